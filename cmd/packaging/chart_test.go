// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/yaml"
)

// The schemas that validate the rendered chart, each with its go.sum hash. They are not requirements of this module,
// since only their data is read.
var (
	kubernetes = source{"k8s.io/kubernetes@v1.36.3", "h1:qDQdoMiluAE2Eab6Fa52YV+WjiGz9mZFFoagEA6cI+o="}
	keda       = source{"github.com/kedacore/keda/v2@v2.21.0", "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps="}
	operator   = source{"github.com/prometheus-operator/prometheus-operator@v0.85.0", "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s="}
)

// A source is a pinned Go module.
type source struct{ module, sum string }

// dir returns the module's directory, after downloading it if necessary.
func (s source) dir() (string, error) {
	cmd := exec.Command("go", "mod", "download", "-json", s.module)
	cmd.Dir = os.TempDir()
	cmd.Env = append(os.Environ(), "GOWORK=off", "GONOSUMDB=*") // the hash is compared below
	out, err := cmd.Output()
	var m struct{ Dir, Sum, Error string }
	if jsonErr := json.Unmarshal(out, &m); jsonErr != nil || m.Error != "" {
		return "", fmt.Errorf("download %s: %v %s", s.module, err, m.Error)
	}
	if m.Sum != s.sum {
		return "", fmt.Errorf("%s has the hash %s, want %s", s.module, m.Sum, s.sum)
	}
	return m.Dir, nil
}

// An object is a Kubernetes object.
type object = map[string]any

// schemas has the schema of each kind that the chart uses, by apiVersion and kind.
var schemas = sync.OnceValues(func() (map[string]*jsonschema.Schema, error) {
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft7)
	found := map[string]*jsonschema.Schema{}
	dir, err := kubernetes.dir()
	if err != nil {
		return nil, err
	}
	body, err := os.ReadFile(filepath.Join(dir, "api", "openapi-spec", "swagger.json"))
	if err != nil {
		return nil, err
	}
	spec, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	definitions := spec.(object)["definitions"].(object)
	for name, d := range definitions {
		strict(d)
		switch name {
		case "io.k8s.apimachinery.pkg.util.intstr.IntOrString":
			definitions[name] = object{"type": []any{"string", "integer"}}
		case "io.k8s.apimachinery.pkg.api.resource.Quantity":
			definitions[name] = object{"type": []any{"string", "number"}, "pattern": `^[+-]?[0-9.]+([eE][+-]?[0-9]+|[numkMGTPE]i?|Ki)?$`}
		}
	}
	if err := c.AddResource("mem:///kubernetes", object{"definitions": definitions}); err != nil {
		return nil, err
	}
	for name, d := range definitions {
		kinds, _ := d.(object)["x-kubernetes-group-version-kind"].([]any)
		if len(kinds) != 1 {
			continue // one of many is an option of a call
		}
		k := kinds[0].(object)
		version := strings.TrimPrefix(fmt.Sprintf("%s/%s", k["group"], k["version"]), "/")
		s, err := c.Compile("mem:///kubernetes#/definitions/" + name)
		if err != nil {
			return nil, err
		}
		found[version+" "+k["kind"].(string)] = s
	}
	for _, of := range []struct {
		source
		file string
	}{
		{keda, "config/crd/bases/keda.sh_scaledobjects.yaml"},
		{operator, "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"},
	} {
		dir, err := of.dir()
		if err != nil {
			return nil, err
		}
		body, err := os.ReadFile(filepath.Join(dir, of.file))
		if err != nil {
			return nil, err
		}
		var crd struct {
			Spec struct {
				Group    string
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Schema struct{ OpenAPIV3Schema object }
				}
			}
		}
		if err := yaml.Unmarshal(body, &crd); err != nil {
			return nil, err
		}
		for _, v := range crd.Spec.Versions {
			schema := v.Schema.OpenAPIV3Schema
			strict(schema)
			// Definitions need not state the fields of every object.
			schema["properties"].(object)["metadata"] = object{"$ref": "mem:///kubernetes#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
			url := "mem:///" + of.file + "/" + v.Name
			if err := c.AddResource(url, schema); err != nil {
				return nil, err
			}
			s, err := c.Compile(url)
			if err != nil {
				return nil, err
			}
			found[crd.Spec.Group+"/"+v.Name+" "+crd.Spec.Names.Kind] = s
		}
	}
	return found, nil
})

// strict makes a schema refuse unknown fields, like a strict server, and converts OpenAPI's own constructs to JSON
// Schema.
func strict(node any) {
	switch n := node.(type) {
	case object:
		if _, ok := n["properties"].(object); ok && n["additionalProperties"] == nil && n["x-kubernetes-preserve-unknown-fields"] != true {
			n["additionalProperties"] = false
		}
		if n["x-kubernetes-int-or-string"] == true {
			delete(n, "type")
			n["type"] = []any{"string", "integer"}
			delete(n, "anyOf")
		}
		if format, ok := n["format"].(string); ok && (format == "int32" || format == "int64") {
			delete(n, "format")
		}
		for _, v := range n {
			strict(v)
		}
	case []any:
		for _, v := range n {
			strict(v)
		}
	}
}

// texts renders the chart with values and returns the texts by template name.
func texts(values []byte) (map[string]string, error) {
	c, err := loader.Load(filepath.Join("helm", "cloister"))
	if err != nil {
		return nil, err
	}
	given, err := chartutil.ReadValues(values)
	if err != nil {
		return nil, err
	}
	merged, err := chartutil.ToRenderValues(c, given, chartutil.ReleaseOptions{Name: "ci", Namespace: "builds", IsInstall: true}, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err // also what values.schema.json refuses
	}
	return engine.Engine{Strict: true}.Render(c, merged)
}

// render returns the objects of the chart rendered with values.
func render(values []byte) ([]object, error) {
	texts, err := texts(values)
	if err != nil {
		return nil, err
	}
	var names []string
	for name := range texts {
		if !strings.HasSuffix(name, "NOTES.txt") && !strings.HasPrefix(filepath.Base(name), "_") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var objects []object
	for _, name := range names {
		for _, text := range regexp.MustCompile(`(?m)^---$`).Split(texts[name], -1) {
			var o object
			if err := yaml.UnmarshalStrict([]byte(text), &o); err != nil {
				return nil, fmt.Errorf("%s: %w in:\n%s", name, err, text)
			}
			if len(o) > 0 {
				objects = append(objects, o)
			}
		}
	}
	return objects, nil
}

// validate checks an object against the schema of its kind.
func validate(o object, all map[string]*jsonschema.Schema) error {
	kind := fmt.Sprintf("%v %v", o["apiVersion"], o["kind"])
	s, ok := all[kind]
	if !ok {
		return fmt.Errorf("no schema for %s", kind)
	}
	body, err := json.Marshal(o)
	if err != nil {
		return err
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return err
	}
	if err := s.Validate(v); err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}
	return nil
}

// at returns the value at a path of keys and indices, or nil.
func at(v any, path ...any) any {
	for _, p := range path {
		switch k := p.(type) {
		case string:
			m, _ := v.(object)
			v = m[k]
		case int:
			l, _ := v.([]any)
			if k >= len(l) {
				return nil
			}
			v = l[k]
		}
	}
	return v
}

// kind returns the objects of a kind.
func kind(objects []object, name string) []object {
	return slices.DeleteFunc(slices.Clone(objects), func(o object) bool { return o["kind"] != name })
}

func allSchemas(t *testing.T) map[string]*jsonschema.Schema {
	t.Helper()
	all, err := schemas()
	if err != nil {
		sandboxtest.Unavailable(t, "packaging", err)
	}
	return all
}

func TestChartRendersWhatTheClusterTakes(t *testing.T) {
	all := allSchemas(t)
	files, err := filepath.Glob("testdata/values/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d files with values, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			values := must.Get(os.ReadFile(file))(t)
			objects := must.Get(render(values))(t)
			for _, o := range objects {
				must.Succeed(t, validate(o, all))
			}
			for _, err := range holds(objects) {
				t.Error(err)
			}
			text, _ := json.Marshal(objects)
			for _, wants := range wanted[filepath.Base(file)] {
				if !strings.Contains(string(text), wants) {
					t.Errorf("no %s in:\n%s", wants, text)
				}
			}
		})
	}
}

// wanted has the expected effects of values.
var wanted = map[string][]string{
	"serve.yaml":         {`"--jobs=4"`, `"image":"registry.example.com/team/toolchain:0.1.0"`, `"hostUsers":false`},
	"serve-guarded.yaml": {`"--jobs=16"`, `toolchain@sha256:0123`, `"--tls-client-ca=/etc/cloister/tls/ca.crt"`, `"--auth=/etc/cloister/auth/auth.yaml"`, `"--cas=grpcs://cache.example.com:443"`, `"name":"CLOISTER_CAS_TOKEN","valueFrom":{"secretKeyRef":{"key":"token","name":"cache"}}`, `"--max-size=900GiB"`, `"--lease=12h"`, `"localhostProfile":"cloister"`, `"10.0.0.0/8"`},
	"farm.yaml":          {`"--jobs=0"`, `"--worker-listen=0.0.0.0:8983"`, `"grpc://ci-cloister-head-workers:8983"`, `"--property=OSFamily=linux","--property=Pool=default"`, `"replicas":5`, `"image":"registry.example.com/team/cloister:0.1.0"`},
	"farm-keda.yaml": {
		`"query":"sum(cloister_actions_queued{namespace=\"builds\",pod=~\"ci-cloister-head-.*\"}) + sum(cloister_actions_running{namespace=\"builds\",pod=~\"ci-cloister-head-.*\"})"`,
		`"threshold":"8"`, `"activationThreshold":"0"`, `"minReplicaCount":0`, `"terminationGracePeriodSeconds":3660`, `"podAntiAffinity"`,
	},
	"farm-hpa.yaml":     {`"averageValue":"6"`, `"minReplicas":2`},
	"farm-guarded.yaml": {`"join","grpcs://ci-cloister-head-workers:8983"`, `"name":"CLOISTER_TOKEN","valueFrom":{"secretKeyRef":{"key":"token","name":"worker"}}`, `"--auth=/etc/cloister/auth/auth.yaml"`},
	"join-keda.yaml": {
		`"join","grpc://scheduler.buildbarn:8983","--cas=grpc://storage.buildbarn:8980","--instance=fuse","--size-class=4"`, `"--sandbox=full"`, `SSL_CERT_FILE`,
		`"query":"sum(buildbarn_builder_in_memory_build_queue_tasks_scheduled_total{instance_name_prefix=\"fuse\"}) - (sum(buildbarn_builder_in_memory_build_queue_tasks_executing_duration_seconds_count{instance_name_prefix=\"fuse\"}) or vector(0))"`,
	},
}

// holds returns faults of the objects as a whole, which no schema detects.
func holds(objects []object) (errs []error) {
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	ports, labels := map[string]bool{}, []object{}
	for _, o := range append(kind(objects, "Deployment"), kind(objects, "StatefulSet")...) {
		name := at(o, "metadata", "name")
		pod := at(o, "spec", "template")
		have, _ := at(pod, "metadata", "labels").(object)
		labels = append(labels, have)
		if want := at(o, "spec", "selector", "matchLabels"); !matches(want, have) {
			bad("%v: selects %v and makes %v", name, want, have)
		}
		volumes := map[any]bool{}
		for _, key := range [][]any{{"spec", "volumeClaimTemplates"}, {"spec", "template", "spec", "volumes"}} {
			list, _ := at(o, key...).([]any)
			for _, v := range list {
				n := at(v, "name")
				if n == nil {
					n = at(v, "metadata", "name")
				}
				volumes[n] = true
			}
		}
		container := at(pod, "spec", "containers", 0)
		mounts, _ := at(container, "volumeMounts").([]any)
		for _, m := range mounts {
			if !volumes[at(m, "name")] {
				bad("%v: mounts the volume %v, which it has not", name, at(m, "name"))
			}
			delete(volumes, at(m, "name"))
		}
		if len(volumes) > 0 {
			bad("%v: has volumes that it does not mount: %v", name, volumes)
		}
		list, _ := at(container, "ports").([]any)
		own := map[any]bool{}
		for _, p := range list {
			own[at(p, "name")] = true
			ports[fmt.Sprint(at(p, "name"))] = true
		}
		for _, probe := range []string{"startupProbe", "livenessProbe", "readinessProbe"} {
			if p := at(container, probe, "httpGet", "port"); !own[p] {
				bad("%v: %s asks at %v, which is no port of it", name, probe, p)
			}
		}
		args, _ := at(container, "args").([]any)
		grace, _ := at(pod, "spec", "terminationGracePeriodSeconds").(float64)
		drain := 0
		for _, a := range args {
			if v, ok := strings.CutPrefix(fmt.Sprint(a), "--drain-timeout="); ok {
				drain, _ = strconv.Atoi(strings.TrimSuffix(v, "s"))
			}
		}
		if drain == 0 || int(grace) <= drain {
			bad("%v: is killed after %v s and drains for %d", name, grace, drain)
		}
		// Kubernetes accepts an unmasked /proc only with user namespaces, and privileged containers only without the rest.
		// A head without slots needs neither.
		want, profile := "map[privileged:true]", at(pod, "spec", "securityContext", "seccompProfile", "type")
		if slices.Contains(args, any("--jobs=0")) {
			want = "map[allowPrivilegeEscalation:false capabilities:map[drop:[ALL]]]"
			if profile != "RuntimeDefault" || at(pod, "spec", "securityContext", "appArmorProfile") != nil {
				bad("%v: executes nothing, and is not under the profiles of the container runtime", name)
			}
		} else if at(pod, "spec", "hostUsers") == false {
			want = "map[allowPrivilegeEscalation:false capabilities:map[drop:[ALL]] procMount:Unmasked]"
		}
		if got := fmt.Sprint(at(container, "securityContext")); at(pod, "spec", "securityContext", "runAsNonRoot") != true || got != want {
			bad("%v: has the privileges %s, want %s", name, got, want)
		}
	}
	selects := func(what any, selector any) {
		if !slices.ContainsFunc(labels, func(l object) bool { return matches(selector, l) }) {
			bad("%v selects %v, which no pod has", what, selector)
		}
	}
	for _, o := range objects {
		name := fmt.Sprint(o["kind"], " ", at(o, "metadata", "name"))
		switch o["kind"] {
		case "Service":
			selects(name, at(o, "spec", "selector"))
			list, _ := at(o, "spec", "ports").([]any)
			for _, p := range list {
				if !ports[fmt.Sprint(at(p, "targetPort"))] {
					bad("%s: leads to the port %v, which no pod has", name, at(p, "targetPort"))
				}
			}
		case "PodDisruptionBudget", "PodMonitor":
			selects(name, at(o, "spec", "selector", "matchLabels"))
		case "NetworkPolicy":
			selects(name, at(o, "spec", "podSelector", "matchLabels"))
			list, _ := at(o, "spec", "ingress").([]any)
			open := map[string]bool{}
			for _, rule := range list {
				open[fmt.Sprint(at(rule, "ports", 0, "port"))] = true
			}
			if fmt.Sprint(open) != fmt.Sprint(ports) {
				bad("%s: opens %v of the ports %v", name, open, ports)
			}
		case "ScaledObject", "HorizontalPodAutoscaler":
			target := at(o, "spec", "scaleTargetRef", "name")
			if !slices.ContainsFunc(kind(objects, "Deployment"), func(d object) bool {
				return at(d, "metadata", "name") == target && at(d, "spec", "replicas") == nil
			}) {
				bad("%s: scales %v, which is none or has a number of its own", name, target)
			}
		}
	}
	return errs
}

// matches reports whether a pod with the labels is selected.
func matches(selector any, labels object) bool {
	want, ok := selector.(object)
	for k, v := range want {
		ok = ok && labels[k] == v
	}
	return ok && len(want) > 0
}

// TestChartChecksFindFaults checks the checker.
func TestChecksOfTheChartBite(t *testing.T) {
	all := allSchemas(t)
	values := must.Get(os.ReadFile("testdata/values/farm-keda.yaml"))(t)
	objects := func(t *testing.T) []object {
		t.Helper()
		os := must.Get(render(values))(t)
		return os
	}
	first := func(os []object, name string) object { return kind(os, name)[0] }
	for _, c := range []struct {
		name   string
		change func(os []object)
	}{
		{"unknown field", func(os []object) { at(first(os, "Deployment"), "spec").(object)["replica"] = 3 }},
		{"unknown field of a container", func(os []object) {
			at(first(os, "Deployment"), "spec", "template", "spec", "containers", 0).(object)["arg"] = []any{"x"}
		}},
		{"wrong type", func(os []object) {
			at(first(os, "StatefulSet"), "spec").(object)["replicas"] = "1"
		}},
		{"missing field", func(os []object) { delete(at(first(os, "StatefulSet"), "spec").(object), "selector") }},
		{"no quantity", func(os []object) {
			at(first(os, "StatefulSet"), "spec", "volumeClaimTemplates", 0, "spec", "resources", "requests").(object)["storage"] = "a lot"
		}},
		{"null", func(os []object) {
			at(first(os, "Deployment"), "spec", "template", "metadata").(object)["labels"] = nil
		}},
		{"unknown field of KEDA", func(os []object) { at(first(os, "ScaledObject"), "spec").(object)["minReplicas"] = 1 }},
		{"wrong type for KEDA", func(os []object) {
			at(first(os, "ScaledObject"), "spec", "triggers", 0, "metadata").(object)["threshold"] = 8
		}},
		{"unknown field of a PodMonitor", func(os []object) { at(first(os, "PodMonitor"), "spec").(object)["ports"] = []any{} }},
		{"unknown kind", func(os []object) { first(os, "Service")["kind"] = "Servis" }},
	} {
		t.Run(c.name, func(t *testing.T) {
			os := objects(t)
			c.change(os)
			if !slices.ContainsFunc(os, func(o object) bool { return validate(o, all) != nil }) {
				t.Error("the schemas take it")
			}
		})
	}
	for _, c := range []struct {
		name   string
		change func(os []object)
	}{
		{"other labels", func(os []object) {
			delete(at(first(os, "Deployment"), "spec", "template", "metadata", "labels").(object), "app.kubernetes.io/component")
		}},
		{"no volume", func(os []object) { delete(at(first(os, "Deployment"), "spec", "template", "spec").(object), "volumes") }},
		{"no port", func(os []object) {
			at(first(os, "Service"), "spec", "ports", 0).(object)["targetPort"] = "http"
		}},
		{"killed while it drains", func(os []object) {
			at(first(os, "Deployment"), "spec", "template", "spec").(object)["terminationGracePeriodSeconds"] = 30.0
		}},
		{"a number beside the autoscaler", func(os []object) { at(first(os, "Deployment"), "spec").(object)["replicas"] = 2.0 }},
		{"privileges", func(os []object) {
			at(first(os, "Deployment"), "spec", "template", "spec", "containers", 0, "securityContext").(object)["allowPrivilegeEscalation"] = true
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			os := objects(t)
			if errs := holds(os); len(errs) > 0 {
				t.Fatal(errs)
			}
			c.change(os)
			if len(holds(os)) == 0 {
				t.Error("it holds")
			}
		})
	}
}

// TestNotesSayWhoMayCall checks the warning, also with TLS alone, which restricts nobody.
func TestNotesSayWhoMayCall(t *testing.T) {
	const farm = "image: {repository: r}\nmode: farm\n"
	for _, c := range []struct {
		name, values string
		open         []string
	}{
		{"nothing", farm, []string{"can execute commands", "ci-cloister-head-workers:8983 can act as a worker"}},
		{"TLS", farm + "tls: {secretName: s}", []string{"can execute commands", "can act as a worker"}},
		{"callers", farm + "tls: {secretName: s}\nauth: {secretName: a}\nworkers: {tokenSecretName: t}", nil},
		{"TLS of one server", "image: {repository: r}\ntls: {secretName: s}", []string{"can execute commands"}},
		{"certificates", "image: {repository: r}\ntls: {secretName: s, clientCA: true}", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := must.Get(texts([]byte(c.values)))(t)
			notes := all["cloister/templates/NOTES.txt"]
			for _, text := range c.open {
				if !strings.Contains(notes, text) {
					t.Errorf("got notes without %q:\n%s", text, notes)
				}
			}
			if strings.Contains(notes, "Anyone") != (c.open != nil) || !strings.Contains(c.values, "farm") && strings.Contains(notes, "act as a worker") {
				t.Errorf("got a wrong warning about access in:\n%s", notes)
			}
		})
	}
}

// TestMistakesInValuesAreRefused checks that errors name the mistake.
func TestMistakesInValuesAreRefused(t *testing.T) {
	const image = "image: {repository: r}\n"
	for _, c := range []struct{ name, values, want string }{
		{"no image", "mode: serve", "image"},
		{"unknown mode", image + "mode: head", "mode"},
		{"unknown key", image + "job: 4", "job"},
		{"unknown key further down", image + "cache: {sise: 1Gi}", "sise"},
		{"no jobs", image + "jobs: 0", "jobs"},
		{"no URL", image + "mode: join\nscheduler: {url: 'scheduler:8983'}", "url"},
		{"no scheduler", image + "mode: join", "scheduler.url: state where"},
		{"scheduler of a farm", image + "mode: farm\nscheduler: {url: 'grpc://s:1'}", "scheduler.url is of mode join"},
		{"a single server that scales", image + "autoscaling: {kind: keda}", "choose mode farm"},
		{"HPA from nothing", image + "mode: farm\nautoscaling: {kind: hpa, min: 0}", "autoscaling.min"},
		{"more than the most", image + "mode: farm\nautoscaling: {kind: keda, min: 11}", "min is more than max"},
		{"tokens in the open", image + "auth: {secretName: a}", "needs tls.secretName"},
		{"clients' certificates without TLS", image + "tls: {clientCA: true}", "tls.clientCA"},
		{"a farm that knows certificates alone", image + "mode: farm\ntls: {secretName: s, clientCA: true}", "no certificate"},
		{"a farm whose workers may not call", image + "mode: farm\ntls: {secretName: s}\nauth: {secretName: a}", "workers.tokenSecretName"},
		{"a token in the open", image + "mode: farm\nworkers: {tokenSecretName: t}", "workers.tokenSecretName: needs tls"},
		{"a token of the store in the open", image + "cas: {url: 'grpc://s:1', tokenSecretName: t}", "cas.tokenSecretName: needs"},
		{"no digest", image + "headImage: {digest: 'sha256:12'}", "digest"},
		{"no drain", image + "drain: {seconds: 0}", "seconds"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := render([]byte(c.values))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}
