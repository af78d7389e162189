// SPDX-License-Identifier: Apache-2.0

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.LocalDateTime;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.zip.ZipEntry;
import java.util.zip.ZipOutputStream;
import javax.tools.FileObject;
import javax.tools.ForwardingJavaFileManager;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileManager;
import javax.tools.JavaFileObject;
import javax.tools.SimpleJavaFileObject;
import javax.tools.StandardJavaFileManager;
import javax.tools.ToolProvider;

/**
 * Compiles Java sources to a jar with javac, like Bazel's JavaBuilder. Its arguments are the jar and the sources, one on
 * each line of a flag file. With --persistent_worker it serves requests as protocol buffers.
 */
public final class Builder {
    private static final JavaCompiler JAVAC = ToolProvider.getSystemJavaCompiler();

    public static void main(String[] args) throws IOException {
        String last = args[args.length - 1];
        if (last.equals("--persistent_worker")) {
            serve(System.in, System.out);
            return;
        }
        StringWriter text = new StringWriter();
        int code = build(Files.readAllLines(Path.of(last.substring(1))), text);
        System.err.print(text);
        System.exit(code);
    }

    private static int build(List<String> args, StringWriter text) throws IOException {
        try (StandardJavaFileManager files = JAVAC.getStandardFileManager(null, null, StandardCharsets.UTF_8)) {
            Classes classes = new Classes(files);
            Iterable<? extends JavaFileObject> sources =
                files.getJavaFileObjectsFromStrings(args.subList(1, args.size()));
            if (!JAVAC.getTask(text, classes, null, List.of("-proc:none"), null, sources).call()) {
                return 1;
            }
            Path jar = Path.of(args.get(0));
            Files.createDirectories(jar.getParent());
            try (ZipOutputStream out = new ZipOutputStream(Files.newOutputStream(jar))) {
                for (Map.Entry<String, ByteArrayOutputStream> c : classes.compiled.entrySet()) {
                    ZipEntry e = new ZipEntry(c.getKey().replace('.', '/') + ".class");
                    e.setTimeLocal(LocalDateTime.of(2010, 1, 1, 0, 0));
                    out.putNextEntry(e);
                    c.getValue().writeTo(out);
                }
            }
            return 0;
        }
    }

    /** Keeps classes in memory. */
    private static final class Classes extends ForwardingJavaFileManager<JavaFileManager> {
        final Map<String, ByteArrayOutputStream> compiled = new TreeMap<>();

        Classes(JavaFileManager files) {
            super(files);
        }

        @Override
        public JavaFileObject getJavaFileForOutput(
            Location where, String name, JavaFileObject.Kind kind, FileObject source) {
            return new SimpleJavaFileObject(Path.of(name).toUri(), kind) {
                @Override
                public OutputStream openOutputStream() {
                    return compiled.computeIfAbsent(name, n -> new ByteArrayOutputStream());
                }
            };
        }
    }

    private static void serve(InputStream in, OutputStream out) throws IOException {
        for (int size = varint(in); size >= 0; size = varint(in)) {
            StringWriter text = new StringWriter();
            int code = build(arguments(new ByteArrayInputStream(in.readNBytes(size))), text);
            byte[] output = text.toString().getBytes(StandardCharsets.UTF_8);
            ByteArrayOutputStream body = new ByteArrayOutputStream();
            body.write(1 << 3); // exit_code
            put(body, code);
            body.write(2 << 3 | 2); // output
            put(body, output.length);
            body.write(output);
            put(out, body.size());
            body.writeTo(out);
            out.flush();
        }
    }

    /** Returns the arguments of a WorkRequest. */
    private static List<String> arguments(InputStream request) throws IOException {
        List<String> args = new ArrayList<>();
        for (int tag = varint(request); tag >= 0; tag = varint(request)) {
            int value = varint(request);
            if ((tag & 7) == 2) {
                byte[] bytes = request.readNBytes(value);
                if (tag >> 3 == 1) {
                    args.add(new String(bytes, StandardCharsets.UTF_8));
                }
            }
        }
        return args;
    }

    /** Returns a number, or -1 at the end of a stream. */
    private static int varint(InputStream in) throws IOException {
        int value = 0;
        for (int shift = 0; shift < 32; shift += 7) {
            int b = in.read();
            if (b < 0) {
                return -1;
            }
            value |= (b & 0x7f) << shift;
            if (b < 0x80) {
                return value;
            }
        }
        throw new IOException("a number of more than 32 bits");
    }

    private static void put(OutputStream out, int value) throws IOException {
        for (; value >= 0x80; value >>>= 7) {
            out.write(value & 0x7f | 0x80);
        }
        out.write(value);
    }
}
