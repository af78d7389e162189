// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/types"
	"slices"
	"strings"
)

// describe returns a line for each exported identifier of p: constants, variables, functions, types, fields and
// methods.
func describe(p *types.Package) []string {
	d := describer{p}
	var lines []string
	for _, id := range p.Scope().Names() {
		o := p.Scope().Lookup(id)
		if !o.Exported() {
			continue
		}
		switch o := o.(type) {
		case *types.Const:
			lines = append(lines, fmt.Sprintf("const %s %s = %s", id, d.text(o.Type()), o.Val().ExactString()))
		case *types.Func:
			lines = append(lines, "func "+id+d.signature(o))
		case *types.TypeName:
			lines = append(lines, d.describe(o)...)
		default:
			lines = append(lines, fmt.Sprintf("var %s %s", id, d.text(o.Type())))
		}
	}
	for i := range lines {
		lines[i] = relative(p) + ": " + lines[i]
	}
	return lines
}

// A describer writes types as seen from a package.
type describer struct{ of *types.Package }

func (d describer) text(t types.Type) string {
	return types.TypeString(t, func(other *types.Package) string {
		if other == d.of {
			return ""
		}
		return relative(other)
	})
}

// describe returns a line for the type, and sorted ones for its exported fields and methods.
func (d describer) describe(o *types.TypeName) []string {
	named, ok := o.Type().(*types.Named)
	if !ok || o.IsAlias() {
		return []string{"type " + o.Name() + " = " + d.text(types.Unalias(o.Type()))}
	}
	var members []string
	head := d.text(named.Underlying())
	switch u := named.Underlying().(type) {
	case *types.Struct:
		head = "struct"
		members = d.fields(o.Name(), u)
		for f := range u.Fields() {
			if f.Embedded() {
				members = append(members, d.promoted(o.Name(), f)...)
			}
		}
	case *types.Interface:
		head = "interface"
		for m := range u.Methods() {
			if !m.Exported() {
				head = "interface with unexported methods"
				continue
			}
			members = append(members, fmt.Sprintf("method (%s) %s%s", o.Name(), m.Name(), d.signature(m)))
		}
	}
	for m := range named.Methods() {
		if m.Exported() {
			members = append(members, fmt.Sprintf("method (%s) %s%s", d.text(m.Signature().Recv().Type()), m.Name(), d.signature(m)))
		}
	}
	slices.Sort(members)
	return append([]string{"type " + d.text(named) + " " + head}, members...)
}

// fields returns a line for each exported field of the struct type of that name.
func (d describer) fields(of string, s *types.Struct) []string {
	var lines []string
	for f := range s.Fields() {
		if f.Exported() {
			lines = append(lines, fmt.Sprintf("field (%s) %s %s", of, f.Name(), d.text(f.Type())))
		}
	}
	return lines
}

// promoted returns a line for each exported field and method that a struct gets from an embedded field of another
// package, which may have no record of its own.
func (d describer) promoted(of string, f *types.Var) []string {
	t := f.Type()
	if p, ok := t.(*types.Pointer); ok {
		t = p.Elem()
	}
	named, ok := t.(*types.Named)
	if !ok || named.Obj().Pkg() == nil || named.Obj().Pkg() == d.of {
		return nil
	}
	var members []string
	if s, ok := named.Underlying().(*types.Struct); ok {
		members = d.fields(of, s)
	}
	var receiver types.Type = types.NewPointer(named)
	if types.IsInterface(named) {
		receiver = named
	}
	for m := range types.NewMethodSet(receiver).Methods() {
		if m.Obj().Exported() {
			members = append(members, fmt.Sprintf("method (%s) %s%s", of, m.Obj().Name(), d.signature(m.Obj().(*types.Func))))
		}
	}
	return members
}

// signature returns the type parameters, parameters and results of f. The compiler names some results that the source
// does not; these names are omitted.
func (d describer) signature(f *types.Func) string {
	s := f.Signature()
	results := make([]*types.Var, s.Results().Len())
	for i := range results {
		r := s.Results().At(i)
		name := r.Name()
		if strings.HasPrefix(name, "#") {
			name = ""
		}
		results[i] = types.NewParam(r.Pos(), r.Pkg(), name, r.Type())
	}
	plain := types.NewSignatureType(nil, nil, nil, s.Params(), types.NewTuple(results...), s.Variadic())
	text := strings.TrimPrefix(d.text(plain), "func")
	if params := s.TypeParams(); params.Len() > 0 {
		var list []string
		for p := range params.TypeParams() {
			list = append(list, p.Obj().Name()+" "+d.text(p.Constraint()))
		}
		text = "[" + strings.Join(list, ", ") + "]" + text
	}
	return text
}

// exposed returns sorted lines for structs of other packages of the module that are reachable through exported fields
// of public structs: importers set and read their fields.
func exposed(public []*types.Package) []string {
	var lines []string
	seen := map[*types.TypeName]bool{}
	var visit func(t types.Type)
	visit = func(t types.Type) {
		switch t := types.Unalias(t).(type) {
		case *types.Pointer:
			visit(t.Elem())
		case *types.Slice:
			visit(t.Elem())
		case *types.Array:
			visit(t.Elem())
		case *types.Map:
			visit(t.Key())
			visit(t.Elem())
		case *types.Named:
			o := t.Obj()
			s, ok := t.Underlying().(*types.Struct)
			if !ok || seen[o] || o.Pkg() == nil || !strings.HasPrefix(o.Pkg().Path(), module+"/") {
				return
			}
			seen[o] = true
			if !slices.Contains(public, o.Pkg()) {
				for _, line := range (describer{o.Pkg()}).fields(o.Name(), s) {
					lines = append(lines, relative(o.Pkg())+": "+line)
				}
			}
			for f := range s.Fields() {
				if f.Exported() {
					visit(f.Type())
				}
			}
		}
	}
	for _, p := range public {
		for _, id := range p.Scope().Names() {
			if o, ok := p.Scope().Lookup(id).(*types.TypeName); ok && o.Exported() {
				visit(o.Type())
			}
		}
	}
	slices.Sort(lines)
	return lines
}
