module github.com/cloister-build/cloister/tests/interop/peers/remotetool

go 1.26.0

require github.com/bazelbuild/remote-apis-sdks v0.0.0-20240806195620-e9017eaf5982
