package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// start runs a program and returns the address that it prints. The test ends the program.
func start(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	cmd.Stderr = os.Stderr
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	address := regexp.MustCompile(`127\.0\.0\.1:[1-9]\d*`)
	for lines := bufio.NewScanner(output); lines.Scan(); {
		if found := address.FindString(lines.Text()); found != "" {
			return "http://" + found
		}
	}
	t.Fatal("the program printed no address")
	return ""
}

func startService(t *testing.T) (service *exec.Cmd, url string) {
	t.Helper()
	tidegate := os.Getenv("TIDEGATE_BIN")
	if tidegate == "" {
		tidegate = filepath.Join("..", "..", "target", "debug", "tidegate")
	}
	limiter := exec.Command(tidegate, "serve", "--config", "tidegate.toml", "--http", "127.0.0.1:0", "--resp", "off", "--admin", "off", "--store", "memory")
	limiterURL := start(t, limiter)
	binary := filepath.Join(t.TempDir(), "go-plans")
	if output, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	service = exec.Command(binary)
	service.Env = append(os.Environ(), "TIDEGATE_URL="+limiterURL, "PORT=0")
	return limiter, start(t, service)
}

func get(t *testing.T, url, key string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequest("GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		request.Header.Set("X-API-Key", key)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(body)
}

// admittedOf returns how many of count requests with this key are admitted, and the last response.
func admittedOf(t *testing.T, url, key string, count int) (admitted int, last *http.Response, body string) {
	t.Helper()
	for range count {
		if last, body = get(t, url+"/v1/hello", key); last.StatusCode == 200 {
			admitted++
		}
	}
	return admitted, last, body
}

func TestEachCallerHasTheLimitsOfItsPlan(t *testing.T) {
	limiter, url := startService(t)
	if admitted, last, _ := admittedOf(t, url, "", 10); admitted != 3 || last.StatusCode != 429 {
		t.Errorf("anonymous: %d admitted, %v", admitted, last)
	}
	admitted, last, body := admittedOf(t, url, "demo-free-key", 10)
	var refusal map[string]any
	if err := json.Unmarshal([]byte(body), &refusal); err != nil {
		t.Fatal(err)
	}
	if admitted != 5 || refusal["error"] != "rate_limited" || refusal["plan"] != "free" || refusal["upgrade_url"] != "https://example.com/plans" {
		t.Errorf("free: %d admitted, %s", admitted, body)
	}
	if last.Header.Get("Retry-After") == "" || last.Header.Get("Cache-Control") != "no-store" || last.Header.Get("X-RateLimit-Limit") != "5" {
		t.Errorf("free: %v", last.Header)
	}
	admitted, last, body = admittedOf(t, url, "demo-pro-key", 10)
	if admitted != 10 || last.Header.Get("X-RateLimit-Remaining") != "590" || !strings.Contains(body, "590 of 600 left") {
		t.Errorf("pro: %d admitted, %v %s", admitted, last.Header, body)
	}
	if admitted, _, _ := admittedOf(t, url, "invented-key", 10); admitted != 0 {
		t.Errorf("an invented key: %d admitted", admitted)
	}
	_ = limiter.Process.Kill()
	if response, body := get(t, url+"/v1/hello", "demo-free-key"); response.StatusCode != 200 || body != "hello\n" {
		t.Errorf("without the service: %v %s", response, body)
	}
}
