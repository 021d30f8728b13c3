// Package servers starts the servers that the tests use, and finds the vectors that all clients replay.
package servers

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Patience is the longest time that a test waits for a condition.
const Patience = 30 * time.Second

// clientsDir returns the directory of all client packages.
func clientsDir() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..")
}

// Root returns the root of the checkout.
func Root() string { return filepath.Join(clientsDir(), "..") }

// Process is a running server. The test stops it at its end.
type Process struct {
	t    *testing.T
	cmd  *exec.Cmd
	once sync.Once
}

func start(t *testing.T, cmd *exec.Cmd) *Process {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatalf("cannot start %s: %v", cmd.Path, err)
	}
	process := &Process{t: t, cmd: cmd}
	t.Cleanup(process.Kill)
	return process
}

// Kill ends the process at once.
func (p *Process) Kill() {
	p.once.Do(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
}

// Pause stops the process with SIGSTOP, so that it accepts connections and does not answer. Resume continues it.
func (p *Process) Pause() { p.signal(syscall.SIGSTOP) }

// Resume continues a paused process.
func (p *Process) Resume() { p.signal(syscall.SIGCONT) }

func (p *Process) signal(signal syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil {
		p.t.Fatal(err)
	}
}

// binary returns the path of a program in .tools/bin or the PATH.
func binary(t *testing.T, name string) string {
	t.Helper()
	if path := filepath.Join(Root(), ".tools", "bin", name); isFile(path) {
		return path
	}
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%s is missing; run scripts/setup.sh", name)
	}
	return path
}

// Redis starts a Redis server without persistence on this Unix socket.
func Redis(t *testing.T, socket string, options ...string) *Process {
	t.Helper()
	return Store(t, "redis-server", socket, options...)
}

// Store starts a redis-server or valkey-server without persistence on this Unix socket.
func Store(t *testing.T, program, socket string, options ...string) *Process {
	t.Helper()
	args := append([]string{"--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir", filepath.Dir(socket)}, options...)
	_ = os.Remove(socket) // of a server that was killed
	process := start(t, exec.Command(binary(t, program), args...))
	Eventually(t, program+" to accept connections", func() bool {
		connection, err := net.Dial("unix", socket)
		if err != nil {
			return false
		}
		return connection.Close() == nil
	})
	return process
}

// Socket returns a path for a Unix socket, short enough for its name.
func Socket(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tidegate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "s")
}

// Tidegate starts `tidegate serve` with its HTTP listener on this address and returns the bound one. The binary is
// TIDEGATE_BIN, or the debug build of the checkout.
func Tidegate(t *testing.T, address string, options ...string) (*Process, string) {
	t.Helper()
	path := os.Getenv("TIDEGATE_BIN")
	if path == "" {
		path = filepath.Join(Root(), "target", "debug", "tidegate")
	}
	if !isFile(path) {
		t.Fatalf("the tidegate binary is missing: set TIDEGATE_BIN, or run cargo build -p tidegate-cli")
	}
	cmd := exec.Command(path, append([]string{"serve", "--http", address, "--resp", "off", "--admin", "off"}, options...)...)
	cmd.Env = append(os.Environ(), "TIDEGATE_STORE=memory")
	cmd.Stderr = os.Stderr
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	process := start(t, cmd)
	pattern := regexp.MustCompile(`^\s*http\s+(127\.0\.0\.1:\d+)`)
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		if match := pattern.FindStringSubmatch(lines.Text()); match != nil {
			return process, match[1]
		}
	}
	t.Fatal("tidegate printed no address")
	return nil, ""
}

// Cluster is a Redis or Valkey Cluster of three masters, started by tidegate-test-cluster.
type Cluster struct {
	// Addresses are those of the masters.
	Addresses []string

	commands io.Writer
	lines    *bufio.Scanner
}

// StartCluster starts a cluster of this brand, redis or valkey, and waits until it serves all slots.
func StartCluster(t *testing.T, brand string) *Cluster {
	t.Helper()
	path := filepath.Join(Root(), "target", "debug", "tidegate-test-cluster")
	if !isFile(path) {
		t.Fatalf("%s is missing: cargo build -p tidegate-testkit", path)
	}
	cmd := exec.Command(path, brand)
	cmd.Stderr = os.Stderr
	commands, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	start(t, cmd)
	cluster := &Cluster{commands: commands, lines: bufio.NewScanner(output)}
	cluster.Addresses = strings.Fields(cluster.read(t))
	return cluster
}

// Run changes the slot of a key: begin-move, end-move, drop-slot or restore-slot.
func (c *Cluster) Run(t *testing.T, command, key string) {
	t.Helper()
	if _, err := fmt.Fprintf(c.commands, "%s %s\n", command, key); err != nil {
		t.Fatal(err)
	}
	if answer := c.read(t); answer != "ok" {
		t.Fatalf("%s: %s", command, answer)
	}
}

func (c *Cluster) read(t *testing.T) string {
	t.Helper()
	if !c.lines.Scan() {
		t.Fatal("tidegate-test-cluster has ended")
	}
	return c.lines.Text()
}

// Eventually waits until the condition holds.
func Eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir()
}

// Status is the part of a decision that belongs to one limit, in microseconds; -1 is never.
type Status struct {
	Limit        string `json:"limit"`
	Allowed      bool   `json:"allowed"`
	Cost         int64  `json:"cost"`
	Remaining    int64  `json:"remaining"`
	RetryAfterUs int64  `json:"retry_after_us"`
	NextAfterUs  int64  `json:"next_after_us"`
	ResetAfterUs int64  `json:"reset_after_us"`
}

// Vectors are the examples that all clients replay.
type Vectors struct {
	ScriptSHA1 string `json:"script_sha1"`
	Keys       []struct {
		SubjectHex string `json:"subject_hex"`
		Limit      string `json:"limit"`
		Prefix     string `json:"prefix"`
		Key        string `json:"key"`
		BanKey     string `json:"ban_key"`
	} `json:"keys"`
	Limits []struct {
		Text  string `json:"text"`
		Line  string `json:"line"`
		Error string `json:"error"`
		Meant string `json:"meant"`
	} `json:"limits"`
	Traces []struct {
		Name  string `json:"name"`
		Steps []struct {
			AtUs  int64 `json:"at_us"`
			Check []struct {
				KeyHex string `json:"key_hex"`
				Limit  string `json:"limit"`
				Cost   int64  `json:"cost"`
			} `json:"check"`
			Refund *int `json:"refund"`
			Reset  *struct {
				KeyHex string `json:"key_hex"`
				Limit  string `json:"limit"`
			} `json:"reset"`
			Allowed bool     `json:"allowed"`
			Limits  []Status `json:"limits"`
		} `json:"steps"`
	} `json:"traces"`
	Addresses []struct {
		Peer    string   `json:"peer"`
		Trusted []string `json:"trusted"`
		Header  string   `json:"header"`
		Lines   []string `json:"lines"`
		Address string   `json:"address"`
		Subject string   `json:"subject"`
	} `json:"addresses"`
	Answers []struct {
		AtUs    int64             `json:"at_us"`
		Limits  []Status          `json:"limits"`
		Status  int               `json:"status"`
		Headers map[string]string `json:"headers"`
		Body    map[string]any    `json:"body"`
		Problem map[string]any    `json:"problem"`
	} `json:"answers"`
	Accepts []struct {
		Lines   []string `json:"lines"`
		Problem bool     `json:"problem"`
	} `json:"accepts"`
}

// LoadVectors reads vectors.json.
func LoadVectors(t *testing.T) Vectors {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(clientsDir(), "vectors.json"))
	if err != nil {
		t.Fatal(err)
	}
	var vectors Vectors
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	return vectors
}
