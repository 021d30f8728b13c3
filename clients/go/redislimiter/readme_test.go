package redislimiter_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tollgate/internal/servers"
)

func TestProgramsInTheReadmeCompile(t *testing.T) {
	packages := filepath.Join(servers.Root(), "clients", "go")
	readme, err := os.ReadFile(filepath.Join(packages, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	module, err := os.ReadFile(filepath.Join(packages, "redislimiter", "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile(filepath.Join(packages, "redislimiter", "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	goMod := strings.Replace(string(module), "module tollgate/redislimiter", "module readme", 1)
	goMod = strings.Replace(goMod, "=> ../", "=> "+packages, 1)
	goMod += "\nrequire tollgate/redislimiter v0.0.0\n\nreplace tollgate/redislimiter => " + filepath.Join(packages, "redislimiter") + "\n"
	programs := 0
	for _, block := range strings.Split(string(readme), "```go\n")[1:] {
		program, _, _ := strings.Cut(block, "```")
		if !strings.HasPrefix(program, "package main") {
			continue
		}
		programs++
		dir := t.TempDir()
		for name, text := range map[string]string{"go.mod": goMod, "go.sum": string(sums), "main.go": program} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		build := exec.Command("go", "build", "-o", os.DevNull, ".")
		build.Dir, build.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
		if output, err := build.CombinedOutput(); err != nil {
			t.Errorf("%v: %s\n%s", err, output, program)
		}
	}
	if programs != 2 {
		t.Errorf("found %d programs", programs)
	}
}
