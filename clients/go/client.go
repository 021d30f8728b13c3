package tidegate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
)

const (
	// DefaultDeadline is the default deadline of a call to the service.
	DefaultDeadline = 50 * time.Millisecond

	idleConnsMax    = 256
	answerBytesMax  = 1 << 20
	messageRunesMax = 256
)

// Client asks the service `tidegate serve` over HTTP. It keeps connections open and is safe for concurrent use.
type Client struct {
	base     string
	token    string
	deadline time.Duration
	http     *http.Client
	failures FailurePolicy
	err      error // of an invalid URL
}

var _ Limiter = (*Client)(nil)

// Option is an option of [New].
type Option func(*Client)

// WithDeadline sets the deadline of each call, including connecting. Defaults to 50 ms. A wait for units is added.
func WithDeadline(deadline time.Duration) Option { return func(c *Client) { c.deadline = deadline } }

// WithOnError sets what happens if there is no verdict. Defaults to [Allow].
func WithOnError(onError OnError) Option { return func(c *Client) { c.failures.OnError = onError } }

// WithToken sets the bearer token that the service requires. Defaults to none.
func WithToken(token string) Option { return func(c *Client) { c.token = token } }

// WithLogger sets the logger for failures, which are logged at most once a second. Defaults to slog.Default.
func WithLogger(logger *slog.Logger) Option { return func(c *Client) { c.failures.Logger = logger } }

// WithHTTPClient sets the HTTP client, for TLS settings, proxies or Unix sockets of your own. The default one uses no
// proxy, follows no redirects and keeps up to 256 idle connections.
func WithHTTPClient(client *http.Client) Option { return func(c *Client) { c.http = client } }

// New creates a client of the service at this URL, such as http://127.0.0.1:8080. It does not connect. If the URL is
// invalid, every call returns ErrInvalid.
func New(serviceURL string, options ...Option) *Client {
	client := &Client{deadline: DefaultDeadline}
	for _, option := range options {
		option(client)
	}
	if client.http == nil {
		client.http = &http.Client{
			Transport:     &http.Transport{MaxIdleConns: idleConnsMax, MaxIdleConnsPerHost: idleConnsMax, IdleConnTimeout: time.Minute},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	}
	parsed, err := url.Parse(serviceURL)
	switch {
	case err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" || parsed.RawQuery != "" || parsed.Fragment != "":
		client.err = invalid("expected the URL of the service, such as http://127.0.0.1:8080")
	case client.deadline <= 0:
		client.err = invalid("expected a deadline above 0")
	default:
		client.base = strings.TrimRight(serviceURL, "/")
	}
	return client
}

// Close closes idle connections. The client can be used again.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Check takes one unit of each limit for the key, if all of them admit it.
func (c *Client) Check(ctx context.Context, key string, limits ...string) (Decision, error) {
	return c.Do(ctx, CheckOf(key, 1, limits...))
}

// CheckN takes cost units of each limit for the key, if all of them admit it.
func (c *Client) CheckN(ctx context.Context, key string, cost int64, limits ...string) (Decision, error) {
	return c.Do(ctx, CheckOf(key, cost, limits...))
}

// Peek returns the state of the limits for the key without charging anything.
func (c *Client) Peek(ctx context.Context, key string, limits ...string) (Decision, error) {
	return c.Do(ctx, CheckOf(key, 0, limits...))
}

// Wait takes one unit of each limit for the key, and waits for it up to maxWait. If the required wait is longer, the
// decision is a denial, made at once.
func (c *Client) Wait(ctx context.Context, maxWait time.Duration, key string, limits ...string) (Decision, error) {
	check := CheckOf(key, 1, limits...)
	check.MaxWait = maxWait
	return c.Do(ctx, check)
}

// Do decides a check.
func (c *Client) Do(ctx context.Context, check Check) (Decision, error) {
	if err := check.Validate(); err != nil {
		return Decision{}, err
	}
	body := checkBody{Receipt: check.Refundable, WaitMs: int64((check.MaxWait + time.Millisecond - 1) / time.Millisecond)}
	for _, demand := range check.Demands {
		if err := cmp.Or(validText("key", demand.Key), validText("limit", demand.Limit)); err != nil {
			return Decision{}, err
		}
		body.Checks = append(body.Checks, demandBody{demand.Key, demand.Limit, demand.Cost})
	}
	decision, err := c.decide(ctx, body, check.MaxWait)
	for i := range decision.Limits {
		if i < len(check.Demands) {
			decision.Limits[i].Cost = check.Demands[i].Cost
		}
	}
	return decision, err
}

// CheckRequest decides a request by the rules of the service. The peer is the request's RemoteAddr; the service finds
// the client's address by its own trusted_proxies. On a refusal, relay Response or call WriteRefusal.
func (c *Client) CheckRequest(ctx context.Context, request *http.Request) (Decision, error) {
	peer, err := peerOf(request)
	if err != nil {
		return Decision{}, err
	}
	described := &requestBody{Method: request.Method, Path: request.URL.EscapedPath(), Peer: peer.String(), Headers: [][2]string{{"host", request.Host}}}
	for name, values := range request.Header {
		for _, value := range values {
			described.Headers = append(described.Headers, [2]string{strings.ToLower(name), strings.ToValidUTF8(value, "\uFFFD")})
		}
	}
	return c.decide(ctx, checkBody{Request: described, Receipt: true}, 0)
}

// Refund gives back the units of a decision, whose check must have been Refundable. OnError does not apply to refunds.
// After an error it may be called again, because the service applies a receipt only once.
func (c *Client) Refund(ctx context.Context, decision Decision) error {
	return c.refund(ctx, decision, nil)
}

// RefundByStatus gives back what the rules say for a response with this status, for decisions of CheckRequest.
func (c *Client) RefundByStatus(ctx context.Context, decision Decision, status int) error {
	if !decision.RefundsOn(status) {
		return nil
	}
	return c.refund(ctx, decision, &status)
}

func (c *Client) refund(ctx context.Context, decision Decision, status *int) error {
	state := decision.refund
	if state == nil || state.receipt == "" {
		if decision.Allowed && decision.Source != SourceNone && len(decision.Limits) > 0 && status == nil {
			return invalid("the decision has no receipt; set Refundable in the check")
		}
		return nil
	}
	if state.done.Swap(true) {
		return nil
	}
	answer, err := c.post(ctx, "/v1/refund", refundBody{Receipt: state.receipt, Status: status}, c.deadline)
	if err == nil && answer.status != http.StatusOK {
		err = answer.asError()
	}
	if err != nil {
		state.done.Store(false)
	}
	return err
}

type checkBody struct {
	Checks  []demandBody `json:"checks,omitempty"`
	Request *requestBody `json:"request,omitempty"`
	Receipt bool         `json:"receipt,omitempty"`
	WaitMs  int64        `json:"wait_ms,omitempty"`
}

type demandBody struct {
	Key   string `json:"key"`
	Limit string `json:"limit"`
	Cost  int64  `json:"cost"`
}

type requestBody struct {
	Method  string      `json:"method"`
	Path    string      `json:"path"`
	Headers [][2]string `json:"headers"`
	Peer    string      `json:"peer"`
}

type refundBody struct {
	Receipt string `json:"receipt"`
	Status  *int   `json:"status,omitempty"`
}

// answerBody is the JSON body of an answer of the service to a check.
type answerBody struct {
	Allowed *bool  `json:"allowed"`
	Source  Source `json:"source"`
	Limits  []struct {
		Name         string `json:"name"`
		Rule         string `json:"rule"`
		Allowed      bool   `json:"allowed"`
		Quota        int64  `json:"quota"`
		WindowMs     int64  `json:"window_ms"`
		Remaining    int64  `json:"remaining"`
		RetryAfterMs *int64 `json:"retry_after_ms"`
		NextAfterMs  *int64 `json:"next_after_ms"`
		ResetAfterMs *int64 `json:"reset_after_ms"`
	} `json:"limits"`
	refusalBody
	Response *struct {
		Status  int               `json:"status"`
		Headers map[string]string `json:"headers"`
		Body    string            `json:"body"`
	} `json:"response"`
	Receipt  string   `json:"receipt"`
	RefundOn []string `json:"refund_on"`
}

func (c *Client) decide(ctx context.Context, body checkBody, maxWait time.Duration) (Decision, error) {
	answer, err := c.post(ctx, "/v1/check", body, c.deadline+maxWait)
	if err != nil {
		return c.failures.Apply(ctx, err)
	}
	decision, err := answer.decision()
	if err != nil {
		return c.failures.Apply(ctx, err)
	}
	return decision, nil
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

// post sends a request and reads the answer within the deadline.
func (c *Client) post(ctx context.Context, path string, body any, deadline time.Duration) (answer, error) {
	if c.err != nil {
		return answer{}, c.err
	}
	text, err := json.Marshal(body)
	if err != nil {
		return answer{}, &Error{Kind: ErrInvalid, Message: "the check cannot be encoded", Cause: err}
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+path, bytes.NewReader(text))
	if err != nil {
		return answer{}, &Error{Kind: ErrInvalid, Message: "the request cannot be built", Cause: err}
	}
	request.Header.Set("Content-Type", "application/json")
	if c.token != "" {
		request.Header.Set("Authorization", "Bearer "+c.token)
	}
	response, err := c.http.Do(request)
	if err != nil {
		return answer{}, c.unreachable(ctx, err, deadline)
	}
	defer response.Body.Close()
	content, err := io.ReadAll(io.LimitReader(response.Body, answerBytesMax+1))
	if err != nil {
		return answer{}, c.unreachable(ctx, err, deadline)
	}
	if len(content) > answerBytesMax {
		return answer{}, &Error{Kind: ErrProtocol, Message: fmt.Sprintf("the service at %s returned more than %d bytes", c.base, answerBytesMax)}
	}
	return answer{response.StatusCode, response.Header, content}, nil
}

func (c *Client) unreachable(ctx context.Context, err error, deadline time.Duration) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &Error{Kind: ErrUnavailable, Message: fmt.Sprintf("the service at %s did not answer within %v", c.base, deadline), Cause: context.DeadlineExceeded}
	}
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return &Error{Kind: ErrUnavailable, Message: "cannot reach the service at " + c.base, Cause: err}
}

// asError converts an answer that is not a decision to an error.
func (a answer) asError() error {
	var body refusalBody
	_ = json.Unmarshal(a.body, &body) // an answer of another server may not be JSON
	message := fmt.Sprintf("the service answered %d", a.status)
	if body.Message != "" {
		runes := []rune(body.Message)
		message += ": " + string(runes[:min(len(runes), messageRunesMax)])
	}
	kind := ErrProtocol
	switch {
	case a.status == http.StatusUnauthorized || a.status == http.StatusForbidden:
		kind = ErrForbidden
	case a.status == http.StatusBadRequest || a.status == http.StatusRequestEntityTooLarge || a.status == http.StatusRequestURITooLong:
		kind = ErrInvalid
	case a.status >= 500 || a.status == http.StatusConflict || a.status == http.StatusTooManyRequests || a.status == http.StatusRequestTimeout:
		kind = ErrUnavailable
	}
	return &Error{Kind: kind, Message: message}
}

// decision converts an answer to a decision.
func (a answer) decision() (Decision, error) {
	var body answerBody
	isDecision := a.status == 200 || a.status == 429 || a.status == 403 || a.status == 503 || a.status == 414
	if err := json.Unmarshal(a.body, &body); err != nil || body.Allowed == nil || !isDecision || *body.Allowed != (a.status == 200) {
		if a.status == 200 {
			return Decision{}, &Error{Kind: ErrProtocol, Message: "the service returned an answer that is not a decision"}
		}
		return Decision{}, a.asError()
	}
	decision := Decision{Allowed: *body.Allowed, Source: body.Source, refusal: body.refusalBody, header: rateLimitHeaders(a.header)}
	for _, limit := range body.Limits {
		decision.Limits = append(decision.Limits, LimitStatus{
			Name: limit.Name, Rule: limit.Rule, Allowed: limit.Allowed, Quota: limit.Quota, capacity: limit.Quota,
			Window: time.Duration(limit.WindowMs) * time.Millisecond, Remaining: limit.Remaining,
			RetryAfter: millis(limit.RetryAfterMs), NextAfter: millis(limit.NextAfterMs), ResetAfter: millis(limit.ResetAfterMs),
		})
	}
	decision.summarise()
	if !decision.Allowed {
		decision.Reason = map[int]Reason{429: RateLimited, 403: Banned, 503: Unavailable}[a.status]
		if body.Error != "" {
			decision.Reason = Reason(body.Error)
			decision.RetryAfter = millis(body.RetryAfterMs)
		}
	}
	if body.Response != nil {
		decision.Response = &Response{Status: body.Response.Status, Header: make(http.Header), Body: body.Response.Body}
		for name, value := range body.Response.Headers {
			decision.Response.Header.Set(name, value)
		}
	}
	if body.Receipt != "" {
		decision.refund = &refundState{receipt: body.Receipt, on: body.RefundOn}
	}
	return decision, nil
}

// rateLimitHeaders returns the rate-limit headers of an answer.
func rateLimitHeaders(from http.Header) http.Header {
	header := make(http.Header)
	for _, name := range []string{"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset", "Ratelimit", "Ratelimit-Policy"} {
		if values := from.Values(name); len(values) > 0 {
			header[name] = values
		}
	}
	return header
}

func millis(ms *int64) time.Duration {
	if ms == nil || *ms < 0 {
		return Never
	}
	return time.Duration(*ms) * time.Millisecond
}

// peerOf returns the address of the request's peer.
func peerOf(request *http.Request) (netip.Addr, error) {
	if peer, err := netip.ParseAddrPort(request.RemoteAddr); err == nil {
		return peer.Addr().WithZone(""), nil
	}
	peer, err := netip.ParseAddr(request.RemoteAddr)
	if err != nil {
		return netip.Addr{}, invalid("the request has no address: its RemoteAddr is %s", shown(request.RemoteAddr))
	}
	return peer.WithZone(""), nil
}
