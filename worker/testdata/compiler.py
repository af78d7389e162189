#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A compiler that speaks Bazel's worker protocol.

Its arguments are a source file and an output file. Each line of the source is a command; the output has a line for each,
with the command and what came of it. With --persistent_worker it serves requests, as JSON if --json follows or
the first byte of its stdin is '{', and otherwise as protocol buffers.
"""
import json
import os
import sys
import time

served = 0
inputs = []
defined = set()


class Failed(Exception):
    pass


def attempt(f):
    try:
        return f() or "ok"
    except OSError as e:
        return type(e).__name__


def files():
    found = []
    for directory, _, names in os.walk("."):
        found += [os.path.relpath(os.path.join(directory, n)) for n in names]
    return sorted(found)


def spill():
    """Leaves files wherever it can."""
    for directory in (".", "src", "out"):
        with open(directory + "/spilled", "w") as f:
            f.write("secret")
    os.makedirs("src/more/deep")
    os.chmod("src/more/deep", 0)


def read(name):
    with open(name) as f:
        return f.read()


def write(name):
    with open(name, "w"):
        pass


def command(words):
    name, args = words[0], words[1:]
    if name == "count":
        return str(served)
    if name == "define":  # a tool that forgets to reset its state
        defined.add(args[0])
        return " ".join(sorted(defined))
    if name == "pid":
        return str(os.getpid())
    if name == "list":
        return " ".join(files())
    if name == "inputs":
        return " ".join(sorted(inputs))
    if name == "spill":
        return attempt(spill)
    if name == "write":
        return args[0] + " " + attempt(lambda: write(args[0]))
    if name == "remove":
        return args[0] + " " + attempt(lambda: os.remove(args[0]))
    if name == "cat":
        return args[0] + " " + attempt(lambda: read(args[0]))
    if name == "missing":
        return " ".join(a for a in args if not os.path.exists(a))
    if name == "fail":
        raise Failed(args[0])
    if name == "exit":
        print("about to exit", file=sys.stderr)
        sys.stderr.flush()
        os._exit(int(args[0]))
    if name == "garbage":
        os.write(1, b"Hello, world\n")
    if name == "sleep":
        time.sleep(float(args[0]))
    if name == "nest":
        fd = os.open(".", os.O_RDONLY)
        for _ in range(int(args[0])):
            os.mkdir("d", dir_fd=fd)
            below = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)
    if name == "eat":
        return str(len(bytearray(int(args[0]))))
    return "ok"


def build(args):
    """Returns the exit code and what the user sees."""
    source, output = args
    os.makedirs(os.path.dirname(output), exist_ok=True)
    with open(output, "w") as out:
        for line in read(source).splitlines():
            try:
                print(line.split()[0], command(line.split()), file=out)
            except Failed as e:
                return int(str(e)), "error: " + line + "\n"
    return 0, ""


def varint(stream):
    value = shift = 0
    while True:
        b = stream.read(1)
        if not b:
            sys.exit(0)
        value |= (b[0] & 0x7F) << shift
        shift += 7
        if b[0] < 0x80:
            return value


def fields(data):
    import io

    stream = io.BytesIO(data)
    while stream.tell() < len(data):
        tag = varint(stream)
        if tag & 7 == 2:
            yield tag >> 3, stream.read(varint(stream))
        else:
            yield tag >> 3, varint(stream)


def encode(value):
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def serve_proto(stream):
    while True:
        data = stream.read(varint(stream))
        args, names = [], []
        for number, value in fields(data):
            if number == 1:
                args.append(value.decode())
            elif number == 2:
                names.append(dict(fields(value))[1].decode())
        code, text = request(args, names)
        body = b"\x08" + encode(code) + b"\x12" + encode(len(text)) + text.encode()
        os.write(1, encode(len(body)) + body)


def serve_json(stream):
    for line in stream:
        r = json.loads(line)
        code, text = request(r["arguments"], [i["path"] for i in r["inputs"]])
        os.write(1, json.dumps({"exitCode": code, "output": text, "requestId": 0}).encode() + b"\n")


def request(args, names):
    global served, inputs
    served, inputs = served + 1, names
    return build(args)


def main(args):
    if args[-1] != "--persistent_worker":
        with open(args[-1][1:]) as f:
            args = f.read().split()
        code, text = build(args)
        sys.stderr.write(text)
        sys.exit(code)
    stream = sys.stdin.buffer
    if stream.peek(1)[:1] == b"{":
        serve_json(stream)
    else:
        serve_proto(stream)


main(sys.argv[1:])
