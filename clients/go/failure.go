package tidegate

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// OnError is what a limiter does if there is no verdict: the service or Redis cannot be reached, does not answer within
// the deadline, or answers with an error.
type OnError int

const (
	// Allow admits the request, with SourceNone. It is the default.
	Allow OnError = iota
	// Deny refuses the request with the reason Unavailable, which middleware answers with 503.
	Deny
	// ReturnError returns the error.
	ReturnError
)

// FailurePolicy turns failures into decisions and logs them, at most once a second. It is for implementations of
// [Limiter]; its zero value admits and logs to slog.Default.
type FailurePolicy struct {
	OnError OnError
	Logger  *slog.Logger // defaults to slog.Default

	mu         sync.Mutex
	lastLogged time.Time
	suppressed int
}

// Apply returns the decision or the error for a failure of a check. Invalid checks, and calls whose context was
// cancelled, are returned as errors and not logged.
func (p *FailurePolicy) Apply(ctx context.Context, err error) (Decision, error) {
	if errors.Is(err, ErrInvalid) {
		return Decision{}, err
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return Decision{}, &Error{Kind: ErrUnavailable, Message: "the check was cancelled", Cause: ctx.Err()}
	}
	p.log(err)
	switch p.OnError {
	case Deny:
		return Decision{Source: SourceNone, Reason: Unavailable, RetryAfter: time.Second, Err: err}, nil
	case ReturnError:
		return Decision{}, err
	}
	return Decision{Allowed: true, Source: SourceNone, Err: err}, nil
}

func (p *FailurePolicy) log(err error) {
	p.mu.Lock()
	now := time.Now()
	if !p.lastLogged.IsZero() && now.Sub(p.lastLogged) < time.Second {
		p.suppressed++
		p.mu.Unlock()
		return
	}
	suppressed := p.suppressed
	p.lastLogged, p.suppressed = now, 0
	p.mu.Unlock()

	logger := p.Logger
	if logger == nil {
		logger = slog.Default()
	}
	effect := map[OnError]string{Allow: "requests are admitted", Deny: "requests are refused", ReturnError: "checks fail"}
	logger.Warn("tidegate: no verdict; "+effect[p.OnError], "error", err, "suppressed", suppressed)
}
