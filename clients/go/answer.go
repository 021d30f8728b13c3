package tidegate

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// refusalBody is the JSON body of a refusal. In decisions of the service its fields are those of the answer.
type refusalBody struct {
	Error   string `json:"error"`
	Message string `json:"message"`
	limitFields
}

// limitFields are the fields that both forms of the body of a refusal have.
type limitFields struct {
	Limit        *int64 `json:"limit,omitempty"`
	RetryAfter   *int64 `json:"retry_after"`
	RetryAfterMs *int64 `json:"retry_after_ms"`
	Policy       string `json:"policy,omitempty"`
	Rule         string `json:"rule,omitempty"`
	Plan         string `json:"plan,omitempty"`
	UpgradeURL   string `json:"upgrade_url,omitempty"`
}

// StatusCode returns the HTTP status of the decision: 200, 429 for a denial, 403 for a ban, 503 if there was no verdict;
// by rules, that of the response.
func (d Decision) StatusCode() int {
	switch {
	case d.Allowed:
		return http.StatusOK
	case d.Response != nil && d.Response.Status != 0:
		return d.Response.Status
	case d.Reason == Banned:
		return http.StatusForbidden
	case d.Reason == Unavailable:
		return http.StatusServiceUnavailable
	}
	return http.StatusTooManyRequests
}

// Header returns the headers of a response with this decision: the rate-limit headers, and on a refusal Retry-After and
// Cache-Control. By rules, they are those of the response.
func (d Decision) Header() http.Header {
	if d.Response != nil {
		return d.Response.Header
	}
	header := d.header.Clone()
	if header == nil {
		header = make(http.Header)
		if len(d.Limits) > 0 && d.Source != SourceNone && !d.at.IsZero() {
			writeRateLimitHeaders(header, d)
		}
	}
	if !d.Allowed {
		header.Set("Cache-Control", "no-store")
		header.Set("Content-Type", "application/json")
		if seconds := retrySeconds(d.RetryAfter); seconds != nil {
			header.Set("Retry-After", strconv.FormatInt(*seconds, 10))
		}
	}
	return header
}

// Body returns the body of a refusal: JSON, or by rules that of the response.
func (d Decision) Body() string {
	if d.Response != nil {
		return d.Response.Body
	}
	return encoded(d.fields())
}

// fields returns the fields of the body of a refusal: those of the service's answer, or computed ones.
func (d Decision) fields() refusalBody {
	if d.refusal.Error != "" {
		return d.refusal
	}
	return d.describe()
}

func encoded(body any) string {
	text, err := json.Marshal(body)
	if err != nil { // strings and numbers can always be encoded
		return "{}"
	}
	return string(text)
}

// WriteRefusal writes a refusal as the response: its status, headers and body, which is JSON.
func (d Decision) WriteRefusal(w http.ResponseWriter) { d.writeRefusal(w, nil) }

// WriteRefusalTo writes a refusal as the response to a request. If its Accept header asks for
// application/problem+json, the body is an RFC 9457 problem document, unless the rules of the service determine it.
func (d Decision) WriteRefusalTo(w http.ResponseWriter, r *http.Request) {
	d.writeRefusal(w, r.Header.Values("Accept"))
}

func (d Decision) writeRefusal(w http.ResponseWriter, accept []string) {
	addHeaders(w.Header(), d.Header())
	body := d.Body()
	if d.Response == nil && asksForProblem(accept) {
		w.Header().Set("Content-Type", problemType)
		body = encoded(d.problem())
	}
	w.WriteHeader(d.StatusCode())
	_, _ = w.Write([]byte(body)) // the client may have disconnected
}

func addHeaders(to, from http.Header) {
	for name, values := range from {
		to[http.CanonicalHeaderKey(name)] = slices.Clone(values)
	}
}

// describe returns the fields of the body of a refusal.
func (d Decision) describe() refusalBody {
	body := refusalBody{Error: string(d.Reason)}
	body.RetryAfter = retrySeconds(d.RetryAfter)
	if d.RetryAfter != Never {
		ms := max(ceilDiv(d.RetryAfter, time.Millisecond), 1)
		body.RetryAfterMs = &ms
	}
	status := strictestOf(d.Limits)
	switch {
	case d.Reason == Banned:
		body.Message = "this caller is banned"
	case d.Reason == Unavailable:
		body.Message = "the rate limiter is temporarily unavailable; try again shortly"
	case status == nil:
		body.Message = "too many requests"
	default:
		body.Limit, body.Policy, body.Rule = &status.Quota, status.Name, status.Rule
		body.Message = messageOf(status, body.RetryAfter)
	}
	return body
}

func messageOf(status *LimitStatus, seconds *int64) string {
	limit := fmt.Sprintf("%d %s", status.Quota, periodOf(status.Window))
	switch {
	case seconds == nil:
		return fmt.Sprintf("a request that costs %d can never pass: the limit is %s, at most %d at once", status.Cost, limit, max(status.capacity, 1))
	case *seconds == 1:
		return "the limit of " + limit + " has been reached; try again in 1 second"
	}
	return fmt.Sprintf("the limit of %s has been reached; try again in %d seconds", limit, *seconds)
}

// writeRateLimitHeaders writes the styles `x`, for the most restrictive limit, and `ietf`, for all of them.
func writeRateLimitHeaders(header http.Header, d Decision) {
	strictest := strictestOf(d.Limits)
	header.Set("X-RateLimit-Limit", strconv.FormatInt(strictest.Quota, 10))
	header.Set("X-RateLimit-Remaining", strconv.FormatInt(strictest.Remaining, 10))
	if wait := untilNext(strictest); wait != Never {
		// Added before it is rounded, so that the same instant is the same second in all responses.
		resetUs := d.at.UnixMicro() + wait.Microseconds()
		header.Set("X-RateLimit-Reset", strconv.FormatInt((resetUs+999_999)/1_000_000, 10))
	}
	var policies, limits []string
	for i := range d.Limits {
		status := &d.Limits[i]
		policy := fmt.Sprintf("%q;q=%d", status.Name, status.Quota)
		if status.Window%time.Second == 0 {
			policy += fmt.Sprintf(";w=%d", status.Window/time.Second)
		}
		limit := fmt.Sprintf("%q;r=%d", status.Name, status.Remaining)
		if wait := untilNext(status); wait != Never {
			limit += fmt.Sprintf(";t=%d", ceilDiv(wait, time.Second))
		}
		policies, limits = append(policies, policy), append(limits, limit)
	}
	header.Set("RateLimit-Policy", strings.Join(policies, ", "))
	header.Set("RateLimit", strings.Join(limits, ", "))
}

// untilNext returns the wait that headers show: until the request would pass, or until one more unit is available.
func untilNext(status *LimitStatus) time.Duration {
	if status.Allowed {
		return status.NextAfter
	}
	return status.RetryAfter
}

// retrySeconds returns a wait in whole seconds, rounded up, at least 1; nil for Never.
func retrySeconds(wait time.Duration) *int64 {
	if wait == Never {
		return nil
	}
	seconds := max(ceilDiv(wait, time.Second), 1)
	return &seconds
}

func ceilDiv(wait, unit time.Duration) int64 { return int64((wait + unit - 1) / unit) }

// distinctNames names limits by their windows. A name that an earlier limit has gets the smallest number, from 2, that
// makes it unique.
func distinctNames(limits []parsedLimit) []string {
	names := make([]string, len(limits))
	for i, limit := range limits {
		names[i] = strings.ReplaceAll(periodOf(limit.window()), " ", "-")
	}
	for i, name := range names {
		if !slices.Contains(names[:i], name) {
			continue
		}
		free := name
		for number := 2; slices.Contains(names, free); number++ {
			free = fmt.Sprintf("%s-%d", name, number)
		}
		names[i] = free
	}
	return names
}
