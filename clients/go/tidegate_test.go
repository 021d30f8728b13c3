package tidegate

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestInvalidChecksAreRejectedBeforeAnyCall(t *testing.T) {
	many := make([]Demand, 33)
	for name, check := range map[string]Check{
		"no limits":          {},
		"33 limits":          {Demands: many},
		"negative cost":      CheckOf("a", -1, "1/s"),
		"absurd cost":        CheckOf("a", 1<<32, "1/s"),
		"long key":           CheckOf(strings.Repeat("k", 64*1024+1), 1, "1/s"),
		"negative wait":      {Demands: []Demand{{"a", "1/s", 1}}, MaxWait: -1},
		"wait over a minute": {Demands: []Demand{{"a", "1/s", 1}}, MaxWait: time.Minute + 1},
		"bad limit":          CheckOf("a", 1, "ten per minute"),
		"same counter twice": CheckOf("a", 1, "1/s", "2/s"),
	} {
		if _, err := NewScriptCall(DefaultPrefix, check, time.Time{}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v is not ErrInvalid", name, err)
		}
	}
	for _, prefix := range []string{"", "a b", "{a}", "ü", "a\n", strings.Repeat("p", 65)} {
		if _, err := NewScriptCall(prefix, CheckOf("a", 1, "1/s"), time.Time{}); !errors.Is(err, ErrInvalid) {
			t.Errorf("prefix %q: %v is not ErrInvalid", prefix, err)
		}
	}
}

func TestErrorOfALimitSaysWhatIsExpected(t *testing.T) {
	for text, phrase := range map[string]string{
		"10/fortnight":                "us, ms, s, min, h, day, week",
		"0/min":                       "1 to 10000000",
		"10":                          "expected a /",
		"10/5":                        "expected a window",
		"10/401day":                   "1ms to 400day",
		"10/min slidding":             "sliding, sliding-log, sliding-counter",
		"10/min sliding burst=5":      "burst is not an option of sliding",
		"10/min token-bucket burst=0": "burst=N",
		"10/min count_denied=yes":     "count_denied=true",
		strings.Repeat("9", 10_000):   "at most 256 bytes",
	} {
		if err := ValidateLimit(text); err == nil || !strings.Contains(err.Error(), phrase) || len(err.Error()) > 200 {
			t.Errorf("%.40s: %v", text, err)
		}
	}
}

func TestMalformedRepliesOfTheScriptAreErrProtocol(t *testing.T) {
	call, err := NewScriptCall(DefaultPrefix, CheckOf("a", 1, "10/min"), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	for _, reply := range [][]int64{nil, {1}, {1, 1}, {1, 0}, {1, 2, 1, 1, 0, 0, 0, 0}, {1, 1, 7, 1, 0, 0, 0, 0}, {1, 1, 1, -9, 0, 0, 0, 0}, {1, 1, 1, 1, 0, 0, 0}, {1, 1, 1, 1, 0, 0, 0, -1}, {1, 1, 1, 1, 0, 0, 0, 0, 0}} {
		if _, err := call.Decode(reply); !errors.Is(err, ErrProtocol) {
			t.Errorf("%v: %v is not ErrProtocol", reply, err)
		}
	}
}

func TestErrorRepliesHaveKindsAndNoKeys(t *testing.T) {
	for reply, kind := range map[string]error{
		"NOPERM No permissions to access a key 'secret'":                          ErrForbidden,
		"ERR ACL failure in script: No permissions to access the 'secret' key":    ErrForbidden,
		"NOAUTH Authentication required.":                                         ErrForbidden,
		"OOM command not allowed when used memory > 'maxmemory'.":                 ErrUnavailable,
		"LOADING Redis is loading the dataset in memory":                          ErrUnavailable,
		"READONLY You can't write against a read only replica.":                   ErrUnavailable,
		"ERR max number of clients reached":                                       ErrUnavailable,
		"TIDEGATE_FOREIGN the key holds another type":                             ErrForeign,
		"TIDEGATE_PARTLY TIDEGATE_FOREIGN the list is not a log":                  ErrForeign,
		"TIDEGATE_INTERNAL user_script:12: secret":                                ErrProtocol,
		"CROSSSLOT Keys in request don't hash to the same slot":                   ErrInvalid,
		"ERR Script attempted to access a non local key in a cluster node secret": ErrInvalid,
		"secret": ErrProtocol,
		"":       ErrProtocol,
	} {
		err := ScriptError(reply)
		if !errors.Is(err, kind) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", reply, err)
		}
	}
}

func TestBanIsARefusalWith403(t *testing.T) {
	call, _ := NewScriptCall(DefaultPrefix, CheckOf("a", 1, "10/min"), time.Time{})
	for remaining, want := range map[int64]string{
		1500000: `{"error":"banned","message":"this caller is banned","retry_after":2,"retry_after_ms":1500}`,
		-1:      `{"error":"banned","message":"this caller is banned","retry_after":null,"retry_after_ms":null}`,
	} {
		decision, err := call.Decode([]int64{1760000000000000, 0, remaining})
		if err != nil || decision.Allowed || decision.Reason != Banned || decision.StatusCode() != 403 || decision.Body() != want {
			t.Errorf("%d: %+v %s %v", remaining, decision, decision.Body(), err)
		}
		if header := decision.Header(); header.Get("X-RateLimit-Limit") != "" || (header.Get("Retry-After") == "2") != (remaining > 0) {
			t.Errorf("%d: %v", remaining, header)
		}
	}
}

func TestPeekNamesNoBanKey(t *testing.T) {
	call, err := NewScriptCall(DefaultPrefix, CheckOf("a", 0, "10/min"), time.Time{})
	if err != nil || len(call.Keys) != 1 {
		t.Errorf("%v %v", call, err)
	}
}

func TestFailurePolicyLogsAtMostOnceASecond(t *testing.T) {
	var log strings.Builder
	policy := FailurePolicy{OnError: Deny, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	failure := &Error{Kind: ErrUnavailable, Message: "no answer"}
	for range 1000 {
		decision, err := policy.Apply(context.Background(), failure)
		if err != nil || decision.Allowed || decision.StatusCode() != 503 || decision.Header().Get("Retry-After") != "1" {
			t.Fatalf("%+v %v", decision, err)
		}
	}
	// The loop takes far less than a second, so that a second line is possible but no third.
	if lines := strings.Count(log.String(), "\n"); lines < 1 || lines > 2 {
		t.Errorf("%d lines: %s", lines, log.String())
	}
	policy.lastLogged = time.Now().Add(-2 * time.Second)
	_, _ = policy.Apply(context.Background(), failure)
	if !strings.Contains(log.String(), "suppressed=999") && !strings.Contains(log.String(), "suppressed=998") {
		t.Errorf("the number of suppressed failures is not logged: %s", log.String())
	}
}

func TestFailurePolicyReturnsInvalidAndCancelledChecks(t *testing.T) {
	var log strings.Builder
	policy := FailurePolicy{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	if _, err := policy.Apply(context.Background(), invalid("bad")); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := policy.Apply(cancelled, errors.New("closed")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if log.Len() > 0 {
		t.Error(log.String())
	}
}
