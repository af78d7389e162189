// SPDX-License-Identifier: Apache-2.0

// Command bbstate calls a method of Buildbarn's BuildQueueState with a JSON request and prints the JSON response, like
// the web pages of bb_scheduler.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/buildbarn/bb-remote-execution/pkg/proto/buildqueuestate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// callTime limits a call.
const callTime = 30 * time.Second

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bbstate:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 3 {
		return errors.New("usage: bbstate HOST:PORT METHOD JSON")
	}
	service := buildqueuestate.File_pkg_proto_buildqueuestate_buildqueuestate_proto.Services().ByName("BuildQueueState")
	method := service.Methods().ByName(protoreflect.Name(args[1]))
	if method == nil {
		return fmt.Errorf("%s has no method %q", service.FullName(), args[1])
	}
	request, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
	if err != nil {
		return err
	}
	response, err := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
	if err != nil {
		return err
	}
	in, out := request.New().Interface(), response.New().Interface()
	if err := protojson.Unmarshal([]byte(args[2]), in); err != nil {
		return fmt.Errorf("%s: %w", method.Input().FullName(), err)
	}
	conn, err := grpc.Dial(args[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if err := conn.Invoke(ctx, fmt.Sprintf("/%s/%s", service.FullName(), method.Name()), in, out); err != nil {
		return err
	}
	text, err := protojson.Marshal(out)
	if err != nil {
		return err
	}
	fmt.Println(string(text))
	return nil
}
