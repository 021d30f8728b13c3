package tidegate

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// MiddlewareOption is an option of [Middleware].
type MiddlewareOption func(*middleware) error

// Limit adds limits that each request must pass, all of them together. At least one is required.
func Limit(limits ...string) MiddlewareOption {
	return func(m *middleware) error {
		for _, limit := range limits {
			if err := ValidateLimit(limit); err != nil {
				return err
			}
		}
		m.limits = append(m.limits, limits...)
		return nil
	}
}

// Key sets the key that is counted. Defaults to the client's address, which is also used if the function returns "".
func Key(key func(*http.Request) string) MiddlewareOption {
	return func(m *middleware) error { m.key = key; return nil }
}

// Cost sets the cost of a request in units. Defaults to 1.
func Cost(cost func(*http.Request) int64) MiddlewareOption {
	return func(m *middleware) error { m.cost = cost; return nil }
}

// TrustedProxies names the networks of the proxies that report the client's address, such as "10.0.0.0/8". Defaults to
// none: the client is the peer of the connection.
func TrustedProxies(networks ...string) MiddlewareOption {
	return func(m *middleware) error {
		parsed, err := parseNetworks(networks)
		m.proxies.networks = append(m.proxies.networks, parsed...)
		return err
	}
}

// ForwardingHeader names the one header in which trusted proxies report the client's address: X-Forwarded-For (the
// default), Forwarded, or one that holds an address, such as CF-Connecting-IP.
func ForwardingHeader(name string) MiddlewareOption {
	return func(m *middleware) error {
		if !isToken(name) {
			return invalid("expected the name of one header, found %s", shown(name))
		}
		m.proxies.header = http.CanonicalHeaderKey(name)
		return nil
	}
}

// RefundOn gives back the units of a request whose response has this outcome. Defaults to no refunds.
func RefundOn(ending Ending) MiddlewareOption {
	return func(m *middleware) error {
		if ending != Success && ending != Failure {
			return invalid("expected success or failure, found %s", shown(string(ending)))
		}
		m.refundOn = ending
		return nil
	}
}

type middleware struct {
	limiter  Limiter
	limits   []string
	key      func(*http.Request) string
	cost     func(*http.Request) int64
	proxies  trustedProxies
	refundOn Ending
}

// Middleware returns net/http middleware that checks each request against explicit limits, by default counted by the
// client's address. Denials are answered with 429, bans with 403, and failures by the limiter's OnError; with
// [ReturnError] they are answered with 503. Rate-limit headers are set on every response. [FromContext] returns the
// decision to the handler.
//
// It panics if an option is invalid or there is no limit.
func Middleware(limiter Limiter, options ...MiddlewareOption) func(http.Handler) http.Handler {
	m := &middleware{limiter: limiter, proxies: trustedProxies{header: "X-Forwarded-For"}}
	for _, option := range options {
		if err := option(m); err != nil {
			panic(err)
		}
	}
	if len(m.limits) == 0 {
		panic(invalid("Middleware needs at least one Limit"))
	}
	decide := func(r *http.Request) (Decision, error) {
		cost := int64(1)
		if m.cost != nil {
			cost = m.cost(r)
		}
		check := CheckOf(m.keyOf(r), cost, m.limits...)
		check.Refundable = m.refundOn != ""
		return limiter.Do(r.Context(), check)
	}
	refunds := func(_ Decision, status int) bool { return m.refundOn == endingOf(status) }
	refund := func(ctx context.Context, d Decision, _ int) error { return limiter.Refund(ctx, d) }
	if m.refundOn == "" {
		return handlerOf(decide, nil, nil)
	}
	return handlerOf(decide, refunds, refund)
}

// RulesMiddleware returns net/http middleware that checks each request by the rules of the service, and relays its
// refusals as they are. Units are given back as the rules say (charge). [FromContext] returns the decision to the
// handler.
func RulesMiddleware(client *Client) func(http.Handler) http.Handler {
	decide := func(r *http.Request) (Decision, error) { return client.CheckRequest(r.Context(), r) }
	return handlerOf(decide, Decision.RefundsOn, client.RefundByStatus)
}

// keyOf returns the key of a request: that of the application, or the subject of the client's address.
func (m *middleware) keyOf(r *http.Request) string {
	if m.key != nil {
		if key := m.key(r); key != "" {
			return key
		}
	}
	peer, err := peerOf(r)
	if err != nil {
		// A Unix socket has no address. Its clients are counted together, which cannot be evaded.
		return "ip:unknown"
	}
	return addressSubject(m.proxies.clientAddress(peer, r.Header.Values(m.proxies.header)))
}

type contextKey struct{}

// FromContext returns the decision that middleware made about the request with this context.
func FromContext(ctx context.Context) (Decision, bool) {
	decision, ok := ctx.Value(contextKey{}).(Decision)
	return decision, ok
}

func handlerOf(
	decide func(*http.Request) (Decision, error),
	refunds func(Decision, int) bool,
	refund func(context.Context, Decision, int) error,
) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			decision, err := decide(r)
			if err != nil {
				refuseByError(w, r, err)
				return
			}
			if !decision.Allowed {
				decision.WriteRefusalTo(w, r)
				return
			}
			addHeaders(w.Header(), decision.Header())
			r = r.WithContext(context.WithValue(r.Context(), contextKey{}, decision))
			if refunds == nil || decision.refund == nil {
				next.ServeHTTP(w, r)
				return
			}
			recorder, body := &statusRecorder{ResponseWriter: w}, &bodyRecorder{}
			if r.Body != nil && r.Body != http.NoBody {
				body.ReadCloser = r.Body
				r.Body = body
			}
			status := http.StatusInternalServerError // if the handler panics
			defer func() {
				// A client that disconnects or sends its body too slowly gets nothing back: the work may have been done.
				isAborted := body.isAborted() || r.Context().Err() != nil
				isTooSlow := status == http.StatusRequestTimeout && !body.isComplete()
				if isAborted || isTooSlow || !refunds(decision, status) {
					return
				}
				if err := refund(context.WithoutCancel(r.Context()), decision, status); err != nil {
					slog.WarnContext(r.Context(), "tidegate: units were not refunded", "error", err)
				}
			}()
			next.ServeHTTP(recorder, r)
			status = recorder.code()
		})
	}
}

// refuseByError answers a request without a verdict: 400 if the check is invalid, else 503. An invalid check is
// refused so that a client cannot send one to avoid being limited.
func refuseByError(w http.ResponseWriter, r *http.Request, err error) {
	decision := Decision{Source: SourceNone, Reason: Unavailable, RetryAfter: time.Second}
	if errors.Is(err, ErrInvalid) {
		slog.WarnContext(r.Context(), "tidegate: the check of a request is invalid", "error", err)
		decision.Response = &Response{
			Status: http.StatusBadRequest,
			Header: http.Header{"Content-Type": {"application/json"}, "Cache-Control": {"no-store"}},
			Body:   `{"error":"bad_request","message":"the request cannot be checked"}`,
		}
	}
	decision.WriteRefusalTo(w, r)
}

// bodyRecorder records whether the body of a request was read to its end. The zero value is an empty body.
type bodyRecorder struct {
	io.ReadCloser
	err atomic.Pointer[error]
}

func (b *bodyRecorder) Read(buffer []byte) (int, error) {
	n, err := b.ReadCloser.Read(buffer)
	if err != nil && !errors.Is(err, http.ErrBodyReadAfterClose) {
		b.err.CompareAndSwap(nil, &err)
	}
	return n, err
}

func (b *bodyRecorder) isComplete() bool {
	err := b.err.Load()
	return b.ReadCloser == nil || err != nil && *err == io.EOF
}

// isAborted returns whether reading failed, for a reason other than a limit of the handler (http.MaxBytesReader is
// outside of this reader).
func (b *bodyRecorder) isAborted() bool {
	err := b.err.Load()
	return err != nil && *err != io.EOF
}

// statusRecorder records the status of a response.
type statusRecorder struct {
	http.ResponseWriter
	status int
}

func (w *statusRecorder) WriteHeader(status int) {
	if w.status < 200 { // informational statuses may come first
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusRecorder) code() int {
	if w.status < 200 {
		return http.StatusOK
	}
	return w.status
}

// Unwrap returns the original writer, for http.ResponseController.
func (w *statusRecorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Flush implements http.Flusher, for handlers that do not use http.ResponseController.
func (w *statusRecorder) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

// Hijack implements http.Hijacker.
func (w *statusRecorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return http.NewResponseController(w.ResponseWriter).Hijack()
}
