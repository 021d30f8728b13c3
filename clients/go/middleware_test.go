package tidegate

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// scriptedLimiter answers each check with the next reply of the script, and records keys and refunds.
type scriptedLimiter struct {
	replies [][]int64
	err     error
	checks  []Check
	refunds int
}

func (l *scriptedLimiter) Do(_ context.Context, check Check) (Decision, error) {
	l.checks = append(l.checks, check)
	if l.err != nil {
		return Decision{}, l.err
	}
	call, err := NewScriptCall(DefaultPrefix, check, time.Time{})
	if err != nil {
		return Decision{}, err
	}
	reply := l.replies[0]
	if len(l.replies) > 1 {
		l.replies = l.replies[1:]
	}
	return call.Decode(reply)
}

func (l *scriptedLimiter) Refund(_ context.Context, decision Decision) error {
	if NewRefundCall(decision, time.Time{}) != nil {
		l.refunds++
	}
	return nil
}

var (
	admitted = []int64{1760000000000000, 1, 1, 9, 0, 60000000, 60000000, 0}
	denied   = []int64{1760000000000000, 1, 0, 0, 12000000, 12000000, 60000000, 0}
	banned   = []int64{1760000000000000, 0, 5000000}
)

func serve(handler http.Handler, request *http.Request) *http.Response {
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, request)
	return recorder.Result()
}

func get(from string, headers ...string) *http.Request {
	request := httptest.NewRequest("GET", "/a%20b?q=1", nil)
	request.RemoteAddr = from
	for i := 0; i < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
	}
	return request
}

func hello(w http.ResponseWriter, r *http.Request) {
	decision, ok := FromContext(r.Context())
	if !ok || !decision.Allowed {
		w.WriteHeader(500)
	}
	_, _ = io.WriteString(w, "hello")
}

func TestMiddlewareAnswersWithHeadersAndRefusals(t *testing.T) {
	limiter := &scriptedLimiter{replies: [][]int64{admitted, denied, banned}}
	handler := Middleware(limiter, Limit("10/min"))(http.HandlerFunc(hello))
	for _, want := range []struct {
		status          int
		remaining, body string
		retryAfter      string
	}{
		{200, "9", "hello", ""},
		{429, "0", `"error":"rate_limited"`, "12"},
		{403, "", `"error":"banned"`, "5"},
	} {
		response := serve(handler, get("203.0.113.9:1"))
		body, _ := io.ReadAll(response.Body)
		header := response.Header
		if response.StatusCode != want.status || header.Get("X-RateLimit-Remaining") != want.remaining || header.Get("Retry-After") != want.retryAfter || !strings.Contains(string(body), want.body) {
			t.Errorf("want %v, found %v %s", want, response, body)
		}
		if (header.Get("Cache-Control") == "no-store") != (want.status != 200) {
			t.Errorf("%v", header)
		}
	}
}

func TestRefusalIsAProblemIfTheRequestAsksForIt(t *testing.T) {
	handler := Middleware(&scriptedLimiter{replies: [][]int64{denied}}, Limit("10/min"))(http.HandlerFunc(hello))
	for accept, want := range map[string][2]string{
		"application/problem+json": {"application/problem+json", `"title":"Quota exceeded","status":429`},
		"*/*":                      {"application/json", `"error":"rate_limited"`},
	} {
		response := serve(handler, get("203.0.113.9:1", "Accept", "text/html", "Accept", accept))
		body, _ := io.ReadAll(response.Body)
		if response.StatusCode != 429 || response.Header.Get("Content-Type") != want[0] || !strings.Contains(string(body), want[1]) {
			t.Errorf("%s: %v %s", accept, response, body)
		}
	}
}

func TestKeyOfARequest(t *testing.T) {
	byUser := Key(func(r *http.Request) string { return r.Header.Get("X-User") })
	for _, test := range []struct {
		options []MiddlewareOption
		request *http.Request
		key     string
	}{
		{nil, get("203.0.113.9:1", "X-Forwarded-For", "6.6.6.6"), "ip:203.0.113.9"},
		{nil, get("[2001:db8:1:2::5%eth0]:1"), "ip:2001:db8:1:2::/64"},
		{nil, get("@"), "ip:unknown"},
		{[]MiddlewareOption{TrustedProxies("10.0.0.0/8", "::1")}, get("10.0.0.1:1", "X-Forwarded-For", "6.6.6.6", "X-Forwarded-For", "198.51.100.7, 10.0.0.2"), "ip:198.51.100.7"},
		{[]MiddlewareOption{TrustedProxies("10.0.0.1"), ForwardingHeader("cf-connecting-ip")}, get("10.0.0.1:1", "CF-Connecting-IP", "198.51.100.7", "X-Forwarded-For", "6.6.6.6"), "ip:198.51.100.7"},
		{[]MiddlewareOption{TrustedProxies("10.0.0.1"), ForwardingHeader("forwarded")}, get("10.0.0.1:1", "Forwarded", `for=6.6.6.6, for="[2001:db8::1]:80"`), "ip:2001:db8::/64"},
		{[]MiddlewareOption{byUser}, get("203.0.113.9:1", "X-User", "42"), "42"},
		{[]MiddlewareOption{byUser}, get("203.0.113.9:1"), "ip:203.0.113.9"},
	} {
		limiter := &scriptedLimiter{replies: [][]int64{admitted}}
		serve(Middleware(limiter, append(test.options, Limit("10/min"))...)(http.HandlerFunc(hello)), test.request)
		if key := limiter.checks[0].Demands[0].Key; key != test.key {
			t.Errorf("key is %q, want %q", key, test.key)
		}
	}
}

func TestUnitsAreRefundedByTheEndingOfTheResponse(t *testing.T) {
	for _, test := range []struct {
		ending  Ending
		handler http.HandlerFunc
		refunds int
	}{
		{Failure, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }, 1},
		{Failure, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(103); w.WriteHeader(404) }, 1},
		{Failure, func(http.ResponseWriter, *http.Request) {}, 0},
		{Failure, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 1},
		{Success, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }, 1},
		{Success, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, 0},
		{"", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, 0},
	} {
		limiter := &scriptedLimiter{replies: [][]int64{admitted}}
		options := []MiddlewareOption{Limit("10/min")}
		if test.ending != "" {
			options = append(options, RefundOn(test.ending))
		}
		func() {
			defer func() { _ = recover() }()
			serve(Middleware(limiter, options...)(test.handler), get("203.0.113.9:1"))
		}()
		if limiter.refunds != test.refunds || limiter.checks[0].Refundable != (test.ending != "") {
			t.Errorf("%q: %d refunds, want %d", test.ending, limiter.refunds, test.refunds)
		}
	}
}

func TestClientThatAbortsGetsNothingBack(t *testing.T) {
	read := func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err != nil {
			w.WriteHeader(400)
			return
		}
		w.WriteHeader(500)
	}
	tooSlow := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(408) }
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for _, test := range []struct {
		name    string
		ctx     context.Context
		body    io.Reader
		handler http.HandlerFunc
		refunds int
	}{
		{"complete", context.Background(), strings.NewReader("body"), read, 1},
		{"without a body", context.Background(), nil, tooSlow, 1},
		{"incomplete", context.Background(), iotest.ErrReader(io.ErrUnexpectedEOF), read, 0},
		{"too slow", context.Background(), strings.NewReader("body"), tooSlow, 0},
		{"disconnected", gone, strings.NewReader("body"), read, 0},
	} {
		limiter := &scriptedLimiter{replies: [][]int64{admitted}}
		request := httptest.NewRequest("POST", "/", test.body).WithContext(test.ctx)
		serve(Middleware(limiter, Limit("10/min"), RefundOn(Failure))(test.handler), request)
		if limiter.refunds != test.refunds {
			t.Errorf("%s: %d refunds, want %d", test.name, limiter.refunds, test.refunds)
		}
	}
}

func TestRefundingMiddlewareStillFlushes(t *testing.T) {
	limiter := &scriptedLimiter{replies: [][]int64{admitted}}
	recorder := httptest.NewRecorder()
	Middleware(limiter, Limit("10/min"), RefundOn(Failure))(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
	})).ServeHTTP(recorder, get("203.0.113.9:1"))
	if !recorder.Flushed {
		t.Error("not flushed")
	}
}

func TestErrorsOfTheLimiterDoNotPassRequests(t *testing.T) {
	for _, test := range []struct {
		err    error
		status int
	}{{invalid("bad"), 400}, {&Error{Kind: ErrUnavailable, Message: "down"}, 503}, {errors.New("other"), 503}} {
		limiter := &scriptedLimiter{err: test.err}
		response := serve(Middleware(limiter, Limit("10/min"))(http.HandlerFunc(hello)), get("203.0.113.9:1"))
		if response.StatusCode != test.status {
			t.Errorf("%v: %d", test.err, response.StatusCode)
		}
	}
}

func TestMiddlewarePanicsOnInvalidOptions(t *testing.T) {
	for i, options := range [][]MiddlewareOption{
		{},
		{Limit("ten")},
		{Limit("10/min"), TrustedProxies("10.0.0.1/8")},
		{Limit("10/min"), TrustedProxies("proxy.example")},
		{Limit("10/min"), ForwardingHeader("a b")},
		{Limit("10/min"), RefundOn("always")},
	} {
		func() {
			defer func() {
				if err, _ := recover().(error); !errors.Is(err, ErrInvalid) {
					t.Errorf("%d: %v", i, err)
				}
			}()
			Middleware(&scriptedLimiter{}, options...)
		}()
	}
}

func TestRulesMiddlewareRelaysTheResponseOfTheService(t *testing.T) {
	var body string
	status := 200
	service := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/refund" {
			answering(200, `{"applied":true}`)(w, r)
			return
		}
		answering(status, body)(w, r)
	})
	client := New(service.URL, WithDeadline(generous), WithLogger(silent()))
	failing := false
	handler := RulesMiddleware(client)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if failing {
			w.WriteHeader(500)
		}
		hello(w, r)
	}))

	body = `{"allowed":true,"source":"store","limits":[],"response":{"headers":{"x-ratelimit-limit":"60"}},"receipt":"R2","refund_on":["failure"]}`
	response := serve(handler, get("203.0.113.9:1", "X-Api-Key", "k"))
	if response.StatusCode != 200 || response.Header.Get("X-RateLimit-Limit") != "60" {
		t.Errorf("%v", response)
	}
	for _, want := range []string{`"method":"GET"`, `"path":"/a%20b"`, `"peer":"203.0.113.9"`, `["host","example.com"]`, `["x-api-key","k"]`, `"receipt":true`} {
		if !strings.Contains(service.requests[0], want) {
			t.Errorf("%s is not in %s", want, service.requests[0])
		}
	}
	if len(service.requests) != 1 {
		t.Errorf("a success was refunded: %q", service.requests)
	}
	failing = true
	serve(handler, get("203.0.113.9:1"))
	if len(service.requests) != 3 || service.requests[2] != `/v1/refund {"receipt":"R2","status":500}` {
		t.Errorf("%q", service.requests)
	}

	status = 429
	body = `{"allowed":false,"source":"store","limits":[],"error":"rate_limited","message":"m","retry_after":7,"retry_after_ms":7000,` +
		`"response":{"status":429,"headers":{"retry-after":"7","content-type":"text/plain"},"body":"slow down"}}`
	response = serve(handler, get("203.0.113.9:1"))
	text, _ := io.ReadAll(response.Body)
	if response.StatusCode != 429 || response.Header.Get("Retry-After") != "7" || response.Header.Get("Content-Type") != "text/plain" || string(text) != "slow down" {
		t.Errorf("%v %s", response, text)
	}

	status, body = 400, `{"error":"bad_request","message":"no"}`
	if response = serve(handler, get("203.0.113.9:1")); response.StatusCode != 400 {
		t.Errorf("a request that the service rejects: %v", response)
	}
	if response = serve(handler, get("@")); response.StatusCode != 400 {
		t.Errorf("a request without an address: %v", response)
	}
	service.Close()
	failing = false
	if response = serve(handler, get("203.0.113.9:1")); response.StatusCode != 200 || response.Header.Get("X-RateLimit-Limit") != "" {
		t.Errorf("without the service: %v", response)
	}
}
