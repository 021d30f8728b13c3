package redislimiter_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"tidegate/internal/servers"
)

// middlewareProgram has the middleware block of the README in place of BLOCK, with each middleware as an argument of
// serve, which prints the responses to two requests.
const middlewareProgram = `package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/redis/go-redis/v9"

	"tidegate"
	"tidegate/redislimiter"
)

func serve(middleware func(http.Handler) http.Handler) {
	handler := middleware(http.NotFoundHandler())
	for i := 0; i < 2; i++ {
		response := httptest.NewRecorder()
		handler.ServeHTTP(response, httptest.NewRequest("GET", "/", nil))
		fmt.Println(response.Code, response.Header().Get("X-RateLimit-Remaining"))
	}
}

func userOf(*http.Request) string { return "42" }

func main() {
	limiter := redislimiter.New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", MaxRetries: -1}), redislimiter.WithDeadline(time.Minute))
	client := tidegate.New("http://127.0.0.1:8080", tidegate.WithDeadline(time.Minute))
	BLOCK
}
`

// blocksOfTheReadme returns the Go blocks of the README: the service, Redis, a cluster, middleware.
func blocksOfTheReadme(t *testing.T) []string {
	t.Helper()
	readme, err := os.ReadFile(filepath.Join(servers.Root(), "clients", "go", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for _, block := range strings.Split(string(readme), "```go\n")[1:] {
		text, _, _ := strings.Cut(block, "```")
		blocks = append(blocks, text)
	}
	if len(blocks) != 4 {
		t.Fatalf("found %d blocks; each needs a test", len(blocks))
	}
	return blocks
}

// TestBlocksOfTheReadme runs every Go block of the README, with the servers of the test, except that of a cluster, which TestCluster runs.
func TestBlocksOfTheReadme(t *testing.T) {
	blocks := blocksOfTheReadme(t)
	socket := servers.Socket(t)
	servers.Redis(t, socket)
	rules := filepath.Join(t.TempDir(), "tidegate.toml")
	if err := os.WriteFile(rules, []byte("[[rules]]\nname = 'all'\nby = ['ip']\nlimits = ['7/h']\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, service := servers.Tidegate(t, "127.0.0.1:0", "--config", rules)

	t.Run("service", func(t *testing.T) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address := listener.Addr().String()
		_ = listener.Close()
		// A generous deadline, for a busy machine.
		program := replace(t, blocks[0], "127.0.0.1:3000", address)
		program = replace(t, program, `"http://127.0.0.1:8080")`, `"http://`+service+`", tidegate.WithDeadline(time.Minute))`)
		program = replace(t, program, "import (", "import (\n\"time\"")
		command := exec.Command(build(t, program))
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
		servers.Eventually(t, "the program to listen", func() bool {
			connection, err := net.Dial("tcp", address)
			return err == nil && connection.Close() == nil
		})
		var statuses []int
		for i := 0; i < 11; i++ {
			response, err := http.Get("http://" + address)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, response.Body)
			_ = response.Body.Close()
			statuses = append(statuses, response.StatusCode)
		}
		if want := "[200 200 200 200 200 200 200 200 200 200 429]"; fmt.Sprint(statuses) != want {
			t.Errorf("found %v", statuses)
		}
	})

	t.Run("Redis", func(t *testing.T) {
		program := patientProgram(t, replace(t, blocks[1], `Addr: "127.0.0.1:6379"`, `Network: "unix", Addr: "`+socket+`"`))
		if found := run(t, program); found != "9 of 10 left\n" {
			t.Errorf("found %s", found)
		}
	})

	t.Run("middleware", func(t *testing.T) {
		block := regexp.MustCompile(`(?m)^tidegate\..*$`).ReplaceAllString(blocks[3], "serve($0)")
		program := replace(t, middlewareProgram, "BLOCK", block)
		program = replace(t, program, `Addr: "127.0.0.1:6379"`, `Network: "unix", Addr: "`+socket+`"`)
		program = replace(t, program, "127.0.0.1:8080", service)
		// Two limits by address; by user; refunded after the failure, which 404 is; by rules.
		if found := run(t, program); found != "404 9\n404 8\n404 9\n404 8\n404 4\n404 4\n404 6\n404 5\n" {
			t.Errorf("found %s", found)
		}
	})
}

// patientProgram returns a program whose limiter has a generous deadline, for a busy machine.
func patientProgram(t *testing.T, program string) string {
	t.Helper()
	program = replace(t, program, "tidegate.ReturnError)", "tidegate.ReturnError), redislimiter.WithDeadline(time.Minute)")
	return replace(t, program, "import (", "import (\n\"time\"")
}

func replace(t *testing.T, text, old, replacement string) string {
	t.Helper()
	if strings.Count(text, old) != 1 {
		t.Fatalf("expected %q once in:\n%s", old, text)
	}
	return strings.Replace(text, old, replacement, 1)
}

// build compiles a program outside of this module, as a user does, and returns the path of the binary.
func build(t *testing.T, program string) string {
	t.Helper()
	packages := filepath.Join(servers.Root(), "clients", "go")
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(packages, "redislimiter", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	goMod := replace(t, read("go.mod"), "module tidegate/redislimiter", "module readme")
	goMod = replace(t, goMod, "=> ../", "=> "+packages)
	goMod += "\nrequire tidegate/redislimiter v0.0.0\n\nreplace tidegate/redislimiter => " + filepath.Join(packages, "redislimiter") + "\n"
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": goMod, "go.sum": read("go.sum"), "main.go": program} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	binary := filepath.Join(dir, "program")
	command := exec.Command("go", "build", "-o", binary, ".")
	command.Dir, command.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s\n%s", err, output, program)
	}
	return binary
}

// run builds and runs a program, and returns what it prints.
func run(t *testing.T, program string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), servers.Patience)
	defer cancel()
	command := exec.CommandContext(ctx, build(t, program))
	command.Stderr = os.Stderr
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(bufio.NewReader(output))
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Wait(); err != nil {
		t.Errorf("%v: %s", err, text)
	}
	return string(text)
}
