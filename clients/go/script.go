package tidegate

import (
	"crypto/sha1"
	"crypto/sha256"
	_ "embed" // for the script
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The script decides in Redis. Its header comment documents keys, arguments and replies. ScriptCall encodes and decodes
// them without a Redis client, so that an adapter for any client is short: package redislimiter is the one for go-redis.

//go:embed tidegate.lua
var script string

var scriptSHA1 = func() string {
	sum := sha1.Sum([]byte(script))
	return hex.EncodeToString(sum[:])
}()

const (
	// StateVersion is the part of every key that names the version of the state that the script writes.
	StateVersion = "tg2"
	// DefaultPrefix is the default first part of every key.
	DefaultPrefix = "tidegate"

	partBytesMax   = 128
	prefixBytesMax = 64
)

// Script returns the source of the Lua script, for EVAL.
func Script() string { return script }

// ScriptSHA1 returns the SHA-1 of the script in hex, for EVALSHA.
func ScriptSHA1() string { return scriptSHA1 }

// ValidatePrefix reports whether the text can be the first part of keys: 1 to 64 printable ASCII characters without
// braces and spaces.
func ValidatePrefix(prefix string) error {
	isPlain := !strings.ContainsFunc(prefix, func(r rune) bool { return r <= ' ' || r > '~' || r == '{' || r == '}' })
	if prefix == "" || len(prefix) > prefixBytesMax || !isPlain {
		return invalid("a key prefix must be 1 to %d printable ASCII characters without braces or spaces", prefixBytesMax)
	}
	return nil
}

// ScriptCall is a call of the script: pass Keys and Args to EVALSHA, and the reply to Decode.
type ScriptCall struct {
	Keys []string
	Args []string

	counters []string
	lines    []string
	demands  []Demand
	limits   []parsedLimit
}

// NewScriptCall encodes a check on keys with this prefix. A zero now stands for the clock of the server; any other
// time is for tests. Errors are ErrInvalid.
func NewScriptCall(prefix string, check Check, now time.Time) (*ScriptCall, error) {
	if err := check.Validate(); err != nil {
		return nil, err
	}
	if err := ValidatePrefix(prefix); err != nil {
		return nil, err
	}
	call := &ScriptCall{demands: check.Demands, Args: []string{timeArgument(now)}}
	var bans []string
	charges := false
	for _, demand := range check.Demands {
		limit, err := parseLimit(demand.Limit)
		if err != nil {
			return nil, err
		}
		key := counterKey(prefix, demand.Key, limit)
		if first := slices.Index(call.counters, key); first >= 0 {
			return nil, invalid("limits %d and %d (counted from 0) use the same counter; merge them or give them different keys", first, len(call.counters))
		}
		call.counters = append(call.counters, key)
		call.lines = append(call.lines, limit.line(demand.Cost))
		call.limits = append(call.limits, limit)
		charges = charges || demand.Cost > 0
		if ban := banKey(prefix, demand.Key); !slices.Contains(bans, ban) {
			bans = append(bans, ban)
		}
	}
	if !charges {
		bans = nil
	}
	call.Keys = append(bans, call.counters...)
	call.Args = append(call.Args, fmt.Sprintf("check %d %d", len(call.lines), len(bans)))
	call.Args = append(call.Args, call.lines...)
	return call, nil
}

func timeArgument(now time.Time) string {
	if now.IsZero() {
		return ""
	}
	return strconv.FormatInt(now.UnixMicro(), 10)
}

// Decode turns the script's reply to a check into a decision. The error is ErrProtocol if the reply is malformed.
func (c *ScriptCall) Decode(reply []int64) (Decision, error) {
	malformed := &Error{Kind: ErrProtocol, Message: "the script returned a malformed reply"}
	if len(reply) == 3 && reply[1] == 0 {
		ban := Decision{Source: SourceStore, Reason: Banned, RetryAfter: micros(reply[2]), at: time.UnixMicro(reply[0])}
		return ban, nil
	}
	if len(reply) != 2+6*len(c.limits) || reply[1] != 1 {
		return Decision{}, malformed
	}
	decision := Decision{Allowed: true, Source: SourceStore, at: time.UnixMicro(reply[0])}
	refund := &refundState{}
	names := distinctNames(c.limits)
	for i, limit := range c.limits {
		values := reply[2+6*i : 8+6*i]
		if values[0] != 0 && values[0] != 1 || slices.Min(values[1:]) < -1 || values[5] < 0 {
			return Decision{}, malformed
		}
		status := LimitStatus{
			Name: names[i], Quota: limit.quota, Window: limit.window(), Cost: c.demands[i].Cost, capacity: limit.capacity,
			Allowed: values[0] == 1, Remaining: values[1],
			RetryAfter: micros(values[2]), NextAfter: micros(values[3]), ResetAfter: micros(values[4]),
		}
		decision.Limits = append(decision.Limits, status)
		decision.Allowed = decision.Allowed && status.Allowed
		if status.Allowed && status.Cost > 0 && status.ResetAfter != Never {
			refund.keys = append(refund.keys, c.counters[i])
			refund.lines = append(refund.lines, c.lines[i], fmt.Sprintf("%d %d %d", reply[0], values[4], values[5]))
		}
	}
	decision.summarise()
	if !decision.Allowed {
		decision.Reason = RateLimited
	} else if len(refund.keys) > 0 {
		decision.refund = refund
	}
	return decision, nil
}

// NewRefundCall encodes the refund of a decision of the script. It returns nil if there is nothing to give back, or if
// it was called for this decision before: a call that may have been executed must not be repeated.
func NewRefundCall(decision Decision, now time.Time) *ScriptCall {
	refund := decision.refund
	if refund == nil || len(refund.keys) == 0 || refund.done.Swap(true) {
		return nil
	}
	args := append([]string{timeArgument(now), fmt.Sprintf("refund %d", len(refund.keys))}, refund.lines...)
	return &ScriptCall{Keys: refund.keys, Args: args}
}

// CounterKeys returns the Redis keys of the check's counters, which are deleted to reset them.
func (c *ScriptCall) CounterKeys() []string { return c.counters }

func micros(us int64) time.Duration {
	if us < 0 {
		return Never
	}
	return time.Duration(us) * time.Microsecond
}

func counterKey(prefix, subject string, limit parsedLimit) string {
	return subjectPrefix(prefix, subject) + limit.algorithm + ":" + strconv.FormatInt(limit.windowUs, 10)
}

// banKey returns the key whose existence bans the subject.
func banKey(prefix, subject string) string { return subjectPrefix(prefix, subject) + "ban" }

// subjectPrefix returns the start of all keys of a subject. The part in braces is the hash tag of Redis Cluster.
func subjectPrefix(prefix, subject string) string {
	return prefix + ":" + StateVersion + ":{" + escaped(subject) + "}:"
}

// escaped returns a subject as it is written in keys: printable ASCII except %, { and } as it is, other bytes as %XX; a
// result of more than 128 bytes as %h and the SHA-256 of the subject; an empty subject as %e.
func escaped(subject string) string {
	if subject == "" {
		return "%e"
	}
	var text strings.Builder
	for i := 0; i < len(subject) && text.Len() <= partBytesMax; i++ {
		switch b := subject[i]; {
		case b > ' ' && b <= '~' && b != '%' && b != '{' && b != '}':
			text.WriteByte(b)
		default:
			fmt.Fprintf(&text, "%%%02X", b)
		}
	}
	if text.Len() > partBytesMax {
		return fmt.Sprintf("%%h%x", sha256.Sum256([]byte(subject)))
	}
	return text.String()
}

// ScriptError converts an error reply of Redis, without its leading dash, to an error. The first word determines the
// kind. The rest of the reply may contain keys, so it is not part of the message.
func ScriptError(reply string) error {
	code, rest, _ := strings.Cut(reply, " ")
	is := func(phrase string) bool { return strings.Contains(reply, phrase) }
	failed := func(kind error, message string) error { return &Error{Kind: kind, Message: message} }
	switch code {
	case "OOM", "LOADING", "READONLY", "BUSY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN":
		return failed(ErrUnavailable, "Redis cannot decide at the moment ("+code+")")
	case "MOVED", "ASK":
		return failed(ErrUnavailable, "the server is a node of a Redis Cluster and does not have the key; use a cluster client")
	case "NOAUTH", "WRONGPASS":
		return failed(ErrForbidden, "Redis requires a different user or password")
	case "NOPERM":
		return failed(ErrForbidden, "the Redis user lacks permission to run the script or to access its keys")
	case "CROSSSLOT":
		return failed(ErrInvalid, "the keys of one check are in different slots of the Redis Cluster; use one key per check")
	case "TIDEGATE_FOREIGN":
		return failed(ErrForeign, "a counter's key holds data that Tidegate did not write; delete it")
	case "TIDEGATE_PARTLY":
		return ScriptError(rest)
	}
	switch {
	case is("max number of clients"):
		return failed(ErrUnavailable, "Redis has reached its connection limit (maxclients)")
	case is("ACL failure in script"), is("The user executing the script can't"):
		return failed(ErrForbidden, "the Redis user lacks permission to run the script or to access its keys")
	case is("non local key"), is("different slots"), is("same slot"):
		return failed(ErrInvalid, "the keys of one check are in different slots of the Redis Cluster; use one key per check")
	}
	return failed(ErrProtocol, "Redis returned an unknown error ("+strings.TrimRight(firstWord(code), ":")+")")
}

// firstWord returns an error code, or a placeholder for a word that is not one.
func firstWord(code string) string {
	if code == "" || len(code) > 32 || strings.Trim(code, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") != "" {
		return "no code"
	}
	return code
}
