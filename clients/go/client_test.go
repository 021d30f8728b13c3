package tidegate

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tidegate/internal/servers"
)

const generous = servers.Patience

const admission = `{"allowed":true,"source":"store","limits":[{"name":"per-minute","quota":10,"window_ms":60000,"remaining":9,` +
	`"retry_after_ms":0,"next_after_ms":60000,"reset_after_ms":60000,"allowed":true}],"receipt":"R1"}`

// fakeService answers each path with a status and a body, and records the requests.
type fakeService struct {
	*httptest.Server
	mu          sync.Mutex
	requests    []string
	connections atomic.Int64
}

func fake(t *testing.T, handler http.HandlerFunc) *fakeService {
	service := &fakeService{}
	service.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		service.mu.Lock()
		service.requests = append(service.requests, r.URL.Path+" "+string(body))
		service.mu.Unlock()
		handler(w, r)
	}))
	service.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			service.connections.Add(1)
		}
	}
	service.Start()
	t.Cleanup(service.Close)
	return service
}

func answering(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "10")
		w.Header().Set("X-Other", "secret")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

func silent() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func TestClientSendsChecksAndReadsDecisions(t *testing.T) {
	service := fake(t, answering(200, admission))
	client := New(service.URL+"/", WithDeadline(generous), WithToken("T"))
	decision, err := client.CheckN(context.Background(), "user:\x00 {42}", 3, "10/min", "1000/day")
	if err != nil || !decision.Allowed || decision.Remaining != 9 || decision.Limit != 10 || decision.ResetAfter != time.Minute || decision.Source != SourceStore {
		t.Errorf("%+v %v", decision, err)
	}
	want := `/v1/check {"checks":[{"key":"user:\u0000 {42}","limit":"10/min","cost":3},{"key":"user:\u0000 {42}","limit":"1000/day","cost":3}]}`
	if service.requests[0] != want {
		t.Errorf("sent %s", service.requests[0])
	}
	if header := decision.Header(); header.Get("X-RateLimit-Limit") != "10" || header.Get("X-Other") != "" {
		t.Errorf("%v", header)
	}
	check := CheckOf("a", 1, "10/min")
	check.Refundable, check.MaxWait = true, 1500*time.Microsecond
	if _, err := client.Do(context.Background(), check); err != nil {
		t.Error(err)
	}
	if want := `"receipt":true,"wait_ms":2}`; !strings.HasSuffix(service.requests[1], want) {
		t.Errorf("sent %s", service.requests[1])
	}
}

func TestServiceOverTLS(t *testing.T) {
	service := httptest.NewUnstartedServer(answering(200, admission))
	service.Config.ErrorLog = log.New(io.Discard, "", 0) // of the handshake that the client rejects
	service.StartTLS()
	defer service.Close()
	trusting := New(service.URL, WithDeadline(generous), WithOnError(ReturnError), WithHTTPClient(service.Client()))
	if decision, err := trusting.Check(context.Background(), "a", "10/min"); err != nil || !decision.Allowed {
		t.Errorf("%+v %v", decision, err)
	}
	if _, err := New(service.URL, WithDeadline(generous), WithOnError(ReturnError), WithLogger(silent())).Check(context.Background(), "a", "10/min"); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a certificate that is not trusted: %v", err)
	}
}

func TestRefundIsSentOncePerDecisionAndAgainAfterAnError(t *testing.T) {
	var fails atomic.Bool
	service := fake(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/v1/check":
			answering(200, admission)(w, r)
		case fails.Load():
			answering(503, `{"error":"unavailable","message":"no store"}`)(w, r)
		default:
			answering(200, `{"applied":true}`)(w, r)
		}
	})
	client := New(service.URL, WithDeadline(generous), WithLogger(silent()))
	decision, err := client.Check(context.Background(), "a", "10/min")
	if err != nil {
		t.Fatal(err)
	}
	fails.Store(true)
	if err := client.Refund(context.Background(), decision); !errors.Is(err, ErrUnavailable) {
		t.Errorf("%v is not ErrUnavailable", err)
	}
	fails.Store(false)
	for range 3 {
		if err := client.Refund(context.Background(), decision); err != nil {
			t.Error(err)
		}
	}
	if len(service.requests) != 3 || service.requests[2] != `/v1/refund {"receipt":"R1"}` {
		t.Errorf("%q", service.requests)
	}
	if err := client.Refund(context.Background(), Decision{Allowed: true, Source: SourceNone}); err != nil {
		t.Errorf("a decision that charged nothing: %v", err)
	}
	decision.refund = nil
	if err := client.Refund(context.Background(), decision); !errors.Is(err, ErrInvalid) {
		t.Errorf("a decision without a receipt: %v", err)
	}
}

func TestAnswersThatAreNoDecisionsHaveKinds(t *testing.T) {
	for _, test := range []struct {
		status int
		body   string
		kind   error
	}{
		{200, "", ErrProtocol},
		{200, "<html>", ErrProtocol},
		{200, "{}", ErrProtocol},
		{200, `{"allowed":false}`, ErrProtocol},
		{200, strings.Repeat("x", answerBytesMax+1), ErrProtocol},
		{302, "", ErrProtocol},
		{400, `{"error":"bad_request","message":"limit: unknown unit"}`, ErrInvalid},
		{401, `{"error":"unauthenticated","message":"token"}`, ErrForbidden},
		{403, "", ErrForbidden},
		{404, "", ErrProtocol},
		{413, "", ErrInvalid},
		{429, "", ErrUnavailable},
		{500, "", ErrUnavailable},
		{502, "<html>", ErrUnavailable},
	} {
		service := fake(t, answering(test.status, test.body))
		client := New(service.URL, WithDeadline(generous), WithOnError(ReturnError), WithLogger(silent()))
		if _, err := client.Check(context.Background(), "a", "10/min"); !errors.Is(err, test.kind) {
			t.Errorf("%d %.20s: %v is not %v", test.status, test.body, err, test.kind)
		}
	}
}

func TestRefusalsOfTheServiceAreDecisions(t *testing.T) {
	for _, test := range []struct {
		status     int
		body       string
		reason     Reason
		retryAfter time.Duration
	}{
		{429, `{"allowed":false,"source":"deny_cache","limits":[{"name":"per-minute","quota":10,"window_ms":60000,"remaining":0,"retry_after_ms":1500,"next_after_ms":1500,"reset_after_ms":60000,"allowed":false}],` +
			`"error":"rate_limited","message":"slow down","limit":10,"retry_after":2,"retry_after_ms":1500,"policy":"per-minute","plan":"free"}`, RateLimited, 1500 * time.Millisecond},
		{429, `{"allowed":false,"source":"store","limits":[],"error":"rate_limited","message":"slow down","retry_after":null,"retry_after_ms":null}`, RateLimited, Never},
		{403, `{"allowed":false,"source":"store","limits":[],"error":"banned","message":"banned","retry_after":null,"retry_after_ms":null}`, Banned, Never},
		{503, `{"allowed":false,"source":"none","limits":[],"error":"unavailable","message":"no store","retry_after":1,"retry_after_ms":1000}`, Unavailable, time.Second},
	} {
		client := New(fake(t, answering(test.status, test.body)).URL, WithDeadline(generous))
		decision, err := client.Check(context.Background(), "a", "10/min")
		if err != nil || decision.Allowed || decision.Reason != test.reason || decision.RetryAfter != test.retryAfter || decision.StatusCode() != test.status {
			t.Errorf("%d: %+v %v", test.status, decision, err)
		}
		var sent, relayed map[string]any
		_ = json.Unmarshal([]byte(test.body), &sent)
		_ = json.Unmarshal([]byte(decision.Body()), &relayed)
		for _, name := range []string{"error", "message", "limit", "retry_after", "retry_after_ms", "policy", "plan"} {
			if sent[name] != relayed[name] {
				t.Errorf("%s is %v, want %v", name, relayed[name], sent[name])
			}
		}
	}
}

func TestBadInputIsErrInvalidWithoutACall(t *testing.T) {
	service := fake(t, answering(200, admission))
	client := New(service.URL, WithDeadline(generous))
	ctx := context.Background()
	_, invalidKey := client.Check(ctx, "\xff", "10/min")
	_, noLimit := client.Check(ctx, "a")
	_, negative := client.CheckN(ctx, "a", -1, "10/min")
	_, absurd := client.CheckN(ctx, "a", 1<<40, "10/min")
	_, longWait := client.Wait(ctx, time.Hour, "a", "10/min")
	_, noDeadline := New(service.URL, WithDeadline(0)).Check(ctx, "a", "10/min")
	errs := []error{invalidKey, noLimit, negative, absurd, longWait, noDeadline}
	for _, url := range []string{"", "127.0.0.1:8080", "ftp://127.0.0.1", "http://", "http://a b", "http://a/?q", "http://[::1"} {
		_, err := New(url).Check(ctx, "a", "10/min")
		errs = append(errs, err)
	}
	for i, err := range errs {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%d: %v is not ErrInvalid", i, err)
		}
	}
	if len(service.requests) > 0 {
		t.Errorf("%q", service.requests)
	}
}

func TestSilentServiceIsDecidedByOnErrorAtTheDeadline(t *testing.T) {
	release := make(chan struct{})
	service := fake(t, func(w http.ResponseWriter, r *http.Request) { <-release })
	defer close(release)
	for _, test := range []struct {
		onError OnError
		allowed bool
		status  int
	}{{Allow, true, 200}, {Deny, false, 503}} {
		var log strings.Builder
		client := New(service.URL, WithOnError(test.onError), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		decision, err := client.Check(context.Background(), "a", "10/min")
		if err != nil || decision.Allowed != test.allowed || decision.StatusCode() != test.status || decision.Source != SourceNone {
			t.Errorf("%+v %v", decision, err)
		}
		if !errors.Is(decision.Err, context.DeadlineExceeded) || !strings.Contains(log.String(), "did not answer within 50ms") {
			t.Errorf("%v, log %s", decision.Err, log.String())
		}
		if len(decision.Header()) > 0 && test.allowed {
			t.Errorf("quota headers without a verdict: %v", decision.Header())
		}
	}
	_, err := New(service.URL, WithOnError(ReturnError), WithLogger(silent())).Check(context.Background(), "a", "10/min")
	if !errors.Is(err, ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := New(service.URL).Check(ctx, "a", "10/min"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A slow service sends each byte soon after the one before, so that a timeout per read never expires.
func TestSlowServiceIsDecidedAtTheDeadlineAndUsedAgainWhenItIsFast(t *testing.T) {
	var isSlow atomic.Bool
	isSlow.Store(true)
	service := fake(t, func(w http.ResponseWriter, r *http.Request) {
		for _, letter := range []byte(admission) {
			if _, err := w.Write([]byte{letter}); err != nil {
				return
			}
			if isSlow.Load() {
				_ = http.NewResponseController(w).Flush()
				time.Sleep(5 * time.Millisecond)
			}
		}
	})
	var log strings.Builder
	client := New(service.URL, WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	ctx := context.Background()
	decision, err := client.Check(ctx, "a", "10/min")
	if err != nil || !decision.Allowed || !errors.Is(decision.Err, context.DeadlineExceeded) || decision.Source != SourceNone {
		t.Errorf("%+v %v", decision, err)
	}
	if !strings.Contains(log.String(), "did not answer within 50ms") {
		t.Errorf("log: %s", log.String())
	}
	isSlow.Store(false)
	servers.Eventually(t, "a decision of the service", func() bool {
		decision, err := client.Check(ctx, "a", "10/min")
		return err == nil && decision.Source == SourceStore
	})
}

func TestUnreachableServiceIsErrUnavailable(t *testing.T) {
	// Packets to 192.0.2.1 are dropped or rejected (RFC 5737). Nothing listens on port 1.
	for _, url := range []string{"http://127.0.0.1:1", "http://192.0.2.1:9", "http://does-not-exist.invalid"} {
		_, err := New(url, WithOnError(ReturnError), WithLogger(silent())).Check(context.Background(), "a", "10/min")
		if !errors.Is(err, ErrUnavailable) {
			t.Errorf("%s: %v", url, err)
		}
	}
}

// longRun is the number of calls of the leak test: 100,000 with TIDEGATE_LONG=1.
func longRun() int {
	if os.Getenv("TIDEGATE_LONG") != "" {
		return 100_000
	}
	return 4_000
}

func TestParallelCallsReuseConnectionsAndLeakNothing(t *testing.T) {
	const parallel = 200
	service := fake(t, answering(200, admission))
	service.requests = make([]string, 0, longRun())
	client := New(service.URL, WithDeadline(generous), WithOnError(ReturnError))
	var group sync.WaitGroup
	for range parallel {
		group.Add(1)
		go func() {
			defer group.Done()
			for range longRun() / parallel {
				if decision, err := client.Check(context.Background(), "a", "10/min"); err != nil || !decision.Allowed {
					t.Errorf("%+v %v", decision, err)
				}
			}
		}()
	}
	group.Wait()
	// A connection per parallel call; a few more if a call dialled while another connection became free.
	if count := service.connections.Load(); count > 2*parallel {
		t.Errorf("%d connections for %d calls", count, longRun())
	}
	client.Close()
	service.CloseClientConnections()
	servers.Eventually(t, "the goroutines of connections to end", func() bool { return runtime.NumGoroutine() < 50 })
}

func TestServiceThatWasKilledOrStoppedIsUsedAgainWhenItIsBack(t *testing.T) {
	service, address := servers.Tidegate(t, "127.0.0.1:0")
	strict := New("http://"+address, WithOnError(ReturnError), WithLogger(silent()))
	var whileStopped, whileKilled strings.Builder
	logging := func(log *strings.Builder) *Client {
		return New("http://"+address, WithLogger(slog.New(slog.NewTextHandler(log, nil))))
	}
	ctx := context.Background()
	answers := func() bool { _, err := strict.Peek(ctx, "a", "10/min"); return err == nil }
	servers.Eventually(t, "an answer", answers)

	service.Pause()
	servers.Eventually(t, "a failure", func() bool { return !answers() })
	decision, err := logging(&whileStopped).Check(ctx, "a", "10/min")
	if err != nil || !decision.Allowed || !errors.Is(decision.Err, context.DeadlineExceeded) || !strings.Contains(whileStopped.String(), "did not answer within 50ms") {
		t.Errorf("stopped: %+v %v, log %s", decision, err, whileStopped.String())
	}
	service.Resume()
	servers.Eventually(t, "an answer after SIGCONT", answers)

	service.Kill()
	decision, err = logging(&whileKilled).Check(ctx, "a", "10/min")
	if err != nil || !decision.Allowed || !errors.Is(decision.Err, ErrUnavailable) || decision.Source != SourceNone || whileKilled.Len() == 0 {
		t.Errorf("killed: %+v %v, log %s", decision, err, whileKilled.String())
	}
	servers.Tidegate(t, address)
	servers.Eventually(t, "an answer of the new process", answers)
}

func TestServiceCountsAndDenies(t *testing.T) {
	_, address := servers.Tidegate(t, "127.0.0.1:0")
	client := New("http://"+address, WithDeadline(generous), WithOnError(ReturnError))
	ctx := context.Background()
	var admitted atomic.Int64
	var group sync.WaitGroup
	for range 200 {
		group.Add(1)
		go func() {
			defer group.Done()
			decision, err := client.Check(ctx, "user:\x00 {42}", "50/h", "1000/day")
			if err != nil {
				t.Error(err)
			}
			if decision.Allowed {
				admitted.Add(1)
			}
		}()
	}
	group.Wait()
	if admitted.Load() != 50 {
		t.Errorf("%d of 200 admitted, want 50", admitted.Load())
	}
	decision, err := client.Check(ctx, "user:\x00 {42}", "50/h", "1000/day")
	if err != nil || decision.Allowed || decision.StatusCode() != 429 || decision.Limit != 50 || len(decision.Limits) != 2 || decision.RetryAfter <= 0 {
		t.Errorf("%+v %v", decision, err)
	}
	if decision, err = client.CheckN(ctx, "b", 51, "50/h"); err != nil || decision.Allowed || decision.RetryAfter != Never {
		t.Errorf("%+v %v", decision, err)
	}
	if decision, err = client.Peek(ctx, "b", "50/h"); err != nil || !decision.Allowed || decision.Remaining != 50 {
		t.Errorf("%+v %v", decision, err)
	}
	if _, err = client.Check(ctx, "b", "50/fortnight"); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "week") {
		t.Error(err)
	}
}

func TestServiceRefundsAndWaits(t *testing.T) {
	_, address := servers.Tidegate(t, "127.0.0.1:0")
	client := New("http://"+address, WithDeadline(generous), WithOnError(ReturnError))
	ctx := context.Background()
	check := CheckOf("a", 3, "5/h")
	check.Refundable = true
	decision, err := client.Do(ctx, check)
	if err != nil || !decision.Allowed || decision.Remaining != 2 {
		t.Fatalf("%+v %v", decision, err)
	}
	for range 2 {
		if err := client.Refund(ctx, decision); err != nil {
			t.Error(err)
		}
		if peek, err := client.Peek(ctx, "a", "5/h"); err != nil || peek.Remaining != 5 {
			t.Errorf("%+v %v", peek, err)
		}
	}
	for range 3 {
		if decision, err := client.Wait(ctx, generous, "b", "1/20ms"); err != nil || !decision.Allowed {
			t.Errorf("%+v %v", decision, err)
		}
	}
	if _, err := client.Check(ctx, "c", "1/h"); err != nil {
		t.Error(err)
	}
	if decision, err := client.Wait(ctx, time.Second, "c", "1/h"); err != nil || decision.Allowed || decision.RetryAfter < time.Minute {
		t.Errorf("a wait that is too long: %+v %v", decision, err)
	}
	forged := Decision{Allowed: true, refund: &refundState{receipt: "forged"}}
	if err := client.Refund(ctx, forged); !errors.Is(err, ErrInvalid) {
		t.Errorf("a receipt that the service did not issue: %v", err)
	}
}

func TestRulesOfTheServiceDecideAndRefund(t *testing.T) {
	config := filepath.Join(t.TempDir(), "tidegate.toml")
	rules := "[[rules]]\nname = \"login\"\nmatch = { path = \"/login\" }\nby = [\"ip\"]\nlimits = [\"2/h\"]\ncharge = \"on_failure\"\n"
	if err := os.WriteFile(config, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	_, address := servers.Tidegate(t, "127.0.0.1:0", "--config", config)
	client := New("http://"+address, WithDeadline(generous), WithOnError(ReturnError))
	status := 200
	handler := RulesMiddleware(client)(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	login := func() *http.Response {
		request := httptest.NewRequest("POST", "/login", nil)
		request.RemoteAddr = "203.0.113.9:1"
		return serve(handler, request)
	}
	for range 5 {
		if response := login(); response.StatusCode != 200 || response.Header.Get("X-RateLimit-Limit") != "2" {
			t.Fatalf("a success is not charged: %v", response)
		}
	}
	status = 401
	for _, want := range []int{401, 401, 429} {
		response := login()
		if response.StatusCode != want || (want == 429) != (response.Header.Get("Retry-After") != "") {
			t.Errorf("want %d: %v", want, response)
		}
	}
}
