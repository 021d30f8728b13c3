// Package tidegate is a client for the rate limiter Tidegate: through the service `tidegate serve` over HTTP, or, with
// package tidegate/redislimiter, through its Lua script on a Redis of your own. Both decide alike, on the same counters.
//
//	client := tidegate.New("http://127.0.0.1:8080")
//	decision, err := client.Check(ctx, "user:42", "10/min", "1000/day")
//	http.Handle("/", tidegate.Middleware(client, tidegate.Limit("10/min"))(mux))
//
// A limit is a string, QUOTA/WINDOW [ALGORITHM] [option=value …], such as "100/min token-bucket burst=20". A denial is a
// [Decision], not an error. Every call has a deadline, and [OnError] determines what happens if there is no answer
// within it.
//
// The package has no dependencies outside the standard library.
package tidegate

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

// Never is a wait that does not end: the cost can never fit into the limit, or a ban has no end.
const Never time.Duration = -1

const (
	demandsMax      = 32
	subjectBytesMax = 64 * 1024
	costMax         = 1<<32 - 1
	// waitMax is the longest wait that the service accepts.
	waitMax = time.Minute
)

// Limiter decides checks and refunds them. [*Client] and *redislimiter.Limiter implement it.
type Limiter interface {
	// Do decides a check. A denial is a Decision; an error means that the check is invalid, that the caller cancelled
	// ctx, or, with [ReturnError], that there is no verdict.
	Do(ctx context.Context, check Check) (Decision, error)

	// Refund gives back the units that an admission charged, at most once per decision. It does nothing if the decision
	// charged nothing or was refunded before.
	Refund(ctx context.Context, decision Decision) error
}

// Check is a list of demands that are decided together: all are charged, or none.
type Check struct {
	// Demands has 1 to 32 elements, of which no two use the same counter. A counter is determined by the key, the
	// algorithm and the window.
	Demands []Demand
	// Refundable makes the service return a receipt, which [Client.Refund] needs. Decisions of the script are always
	// refundable.
	Refundable bool
	// MaxWait is the longest time, up to a minute, to wait for units instead of being denied. Defaults to none. If the
	// required wait is longer, the check is denied at once and charges nothing.
	MaxWait time.Duration
}

// Demand is a limit, the key that is counted, and the cost in units.
type Demand struct {
	Key   string
	Limit string
	// Cost is 0 to 4294967295. A demand that costs 0 charges nothing and is always admitted.
	Cost int64
}

// CheckOf returns the check of one key against several limits, with the same cost for each.
func CheckOf(key string, cost int64, limits ...string) Check {
	demands := make([]Demand, len(limits))
	for i, limit := range limits {
		demands[i] = Demand{Key: key, Limit: limit, Cost: cost}
	}
	return Check{Demands: demands}
}

// Validate reports whether the number of demands, the lengths of their keys, their costs and the wait are in range. It
// does not parse the limits. Errors are [ErrInvalid].
func (c Check) Validate() error {
	if len(c.Demands) == 0 {
		return invalid("a check needs at least one limit")
	}
	if len(c.Demands) > demandsMax {
		return invalid("a check can have at most %d limits; this one has %d", demandsMax, len(c.Demands))
	}
	for _, demand := range c.Demands {
		if len(demand.Key) > subjectBytesMax {
			return invalid("a key can have at most %d bytes; this one has %d", subjectBytesMax, len(demand.Key))
		}
		if demand.Cost < 0 || demand.Cost > costMax {
			return invalid("a cost must be from 0 to %d, found %d", int64(costMax), demand.Cost)
		}
	}
	if c.MaxWait < 0 || c.MaxWait > waitMax {
		return invalid("a wait must be from 0 to %v, found %v", waitMax, c.MaxWait)
	}
	return nil
}

// Source is the component that made a decision.
type Source string

const (
	// SourceStore is the store that all instances share.
	SourceStore Source = "store"
	// SourceDenyCache is the service's cache of recent denials.
	SourceDenyCache Source = "deny_cache"
	// SourceLocal is the service's own share of the limit, while its store is unavailable.
	SourceLocal Source = "local"
	// SourceNone means that nothing was counted: the failure policy decided, or no rule applies.
	SourceNone Source = "none"
)

// Reason is the reason for a refusal. It is the field "error" of the JSON body.
type Reason string

const (
	// RateLimited is the reason for a denial by a limit.
	RateLimited Reason = "rate_limited"
	// Banned is the reason for a refusal because the subject is banned.
	Banned Reason = "banned"
	// Unavailable is the reason for a refusal because there was no verdict and the failure policy is to deny.
	Unavailable Reason = "unavailable"
)

// Decision is the answer to a check.
type Decision struct {
	// Allowed is true if the request may proceed.
	Allowed bool
	// Source is the component that decided.
	Source Source
	// Reason is empty for an admission.
	Reason Reason
	// Limits has one status per demand, in the same order. By rules it has one per limit that applies. It is empty if
	// nothing was counted, or the subject is banned.
	Limits []LimitStatus
	// Limit and Remaining are the quota and the remaining units of the most restrictive limit.
	Limit, Remaining int64
	// RetryAfter is the time until a denied request would be admitted, or Never. For an admission it is 0, except with
	// leaky-bucket, where it is the time to wait before going on.
	RetryAfter time.Duration
	// ResetAfter is the time until the most restrictive limit is whole again.
	ResetAfter time.Duration
	// Response is the response that the rules of the service determine; nil for other decisions.
	Response *Response
	// Err is the failure that prevented a decision; nil if there was none.
	Err error

	at      time.Time // time of the decision by the store's clock; zero if unknown
	header  http.Header
	refusal refusalBody
	refund  *refundState
}

// LimitStatus is the part of a decision that belongs to one limit.
type LimitStatus struct {
	Name    string // name of the limit for clients, such as per-minute
	Rule    string // name of the rule; empty for explicit limits
	Allowed bool
	Quota   int64
	Window  time.Duration
	// Cost is the cost of the demand; 0 in decisions of the service by rules.
	Cost      int64
	Remaining int64
	// RetryAfter is the time until this cost would be admitted, NextAfter until one more unit is available, ResetAfter
	// until the limit is whole again. Each may be Never.
	RetryAfter, NextAfter, ResetAfter time.Duration

	capacity int64 // burst, queue or quota: the largest cost that can ever pass; 0 if unknown
}

// Response is a response to relay: on a refusal all of it, on an admission the headers to add.
type Response struct {
	Status int
	Header http.Header
	Body   string
}

// refundState is what a refund needs. It is shared by the copies of a decision.
type refundState struct {
	done    atomic.Bool
	receipt string   // of the service
	on      []string // outcomes for which the rules refund: success, failure
	keys    []string // of the script, with a limit line and a receipt each
	lines   []string
}

// RefundsOn reports whether the rules give units back for a response with this status: below 400 is a success.
func (d Decision) RefundsOn(status int) bool {
	if d.refund == nil {
		return false
	}
	for _, ending := range d.refund.on {
		if ending == string(endingOf(status)) {
			return true
		}
	}
	return false
}

// Ending is the outcome of a request, for refunds.
type Ending string

const (
	// Success is a response with a status below 400.
	Success Ending = "success"
	// Failure is a response with a status of 400 or more, or a panic of the handler.
	Failure Ending = "failure"
)

func endingOf(status int) Ending {
	if status < 400 {
		return Success
	}
	return Failure
}

// summarise sets Limit, Remaining, RetryAfter and ResetAfter from the statuses.
func (d *Decision) summarise() {
	strictest := strictestOf(d.Limits)
	if strictest == nil {
		return
	}
	d.Limit, d.Remaining, d.ResetAfter = strictest.Quota, strictest.Remaining, strictest.ResetAfter
	for _, status := range d.Limits {
		if status.Allowed == d.Allowed && isLonger(status.RetryAfter, d.RetryAfter) {
			d.RetryAfter = status.RetryAfter
		}
	}
}

// strictestOf returns the status that restricts the client most: of the denials the one with the longest RetryAfter,
// else the one with the smallest part of its quota left; on a tie the first. It returns nil for an empty list.
func strictestOf(statuses []LimitStatus) *LimitStatus {
	var found *LimitStatus
	for i := range statuses {
		next := &statuses[i]
		switch {
		case found == nil,
			found.Allowed && !next.Allowed,
			!found.Allowed && !next.Allowed && isLonger(next.RetryAfter, found.RetryAfter),
			found.Allowed && next.Allowed && next.Remaining*found.Quota < found.Remaining*next.Quota:
			found = next
		}
	}
	return found
}

// isLonger compares two waits, of which Never is the longest.
func isLonger(one, other time.Duration) bool {
	return other != Never && (one == Never || one > other)
}

// validText returns an error if the service cannot receive the text, because JSON strings are Unicode.
func validText(what, text string) error {
	if !utf8.ValidString(text) {
		return invalid("a %s for the service must be valid UTF-8; the script accepts any bytes", what)
	}
	return nil
}

// Kinds of errors, for errors.Is.
var (
	// ErrInvalid is the kind of errors in the arguments: a limit, key, cost, URL or receipt that is not accepted. OnError
	// does not apply to it.
	ErrInvalid = kind("invalid argument")
	// ErrUnavailable is the kind of failures of the service, Redis or the network, and of answers that were too late.
	ErrUnavailable = kind("unavailable")
	// ErrForbidden is the kind of errors about credentials and permissions.
	ErrForbidden = kind("forbidden")
	// ErrForeign is the kind of the error for a key with data that Tidegate did not write.
	ErrForeign = kind("foreign data")
	// ErrProtocol is the kind of errors about answers that Tidegate does not send.
	ErrProtocol = kind("unexpected answer")
)

type kind string

func (k kind) Error() string { return string(k) }

// Error is an error of this package. errors.Is finds its kind, such as ErrUnavailable, and its cause, such as
// context.DeadlineExceeded. The message contains no key.
type Error struct {
	Kind    error
	Message string
	Cause   error // nil if there is none
}

func (e *Error) Error() string {
	if e.Cause == nil {
		return "tidegate: " + e.Message
	}
	return "tidegate: " + e.Message + ": " + e.Cause.Error()
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}

func invalid(format string, values ...any) error {
	return &Error{Kind: ErrInvalid, Message: fmt.Sprintf(format, values...)}
}
