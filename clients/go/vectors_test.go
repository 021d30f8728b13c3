package tidegate

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"tidegate/internal/servers"
)

func unhex(t *testing.T, text string) string {
	t.Helper()
	bytes, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return string(bytes)
}

func TestVectorsOfKeys(t *testing.T) {
	for _, vector := range servers.LoadVectors(t).Keys {
		subject := unhex(t, vector.SubjectHex)
		call, err := NewScriptCall(vector.Prefix, CheckOf(subject, 1, vector.Limit), time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		if want := []string{vector.BanKey, vector.Key}; !reflect.DeepEqual(call.Keys, want) {
			t.Errorf("keys of %q are %q, want %q", subject, call.Keys, want)
		}
	}
}

func TestVectorsOfLimits(t *testing.T) {
	for _, vector := range servers.LoadVectors(t).Limits {
		limit, err := parseLimit(vector.Text)
		switch {
		case vector.Error != "" && err == nil:
			t.Errorf("%q is accepted, want an error: %s", vector.Text, vector.Error)
		case vector.Error != "" && !errors.Is(err, ErrInvalid):
			t.Errorf("%q: %v is not ErrInvalid", vector.Text, err)
		case vector.Error != "" && suggestion(err) != vector.Meant:
			t.Errorf("%q: %v suggests %q, want %q", vector.Text, err, suggestion(err), vector.Meant)
		case vector.Error == "" && err != nil:
			t.Errorf("%q: %v", vector.Text, err)
		case vector.Error == "" && limit.line(1) != vector.Line:
			t.Errorf("%q is %q, want %q", vector.Text, limit.line(1), vector.Line)
		}
	}
}

// suggestion returns the limit that the message of an error suggests, or "".
func suggestion(err error) string {
	_, meant, _ := strings.Cut(err.Error(), "; did you mean ")
	return strings.TrimSuffix(meant, "?")
}

func TestVectorsOfAddresses(t *testing.T) {
	for _, vector := range servers.LoadVectors(t).Addresses {
		networks, err := parseNetworks(vector.Trusted)
		if err != nil {
			t.Fatal(err)
		}
		proxies := trustedProxies{networks, http.CanonicalHeaderKey(vector.Header)}
		address := proxies.clientAddress(netip.MustParseAddr(vector.Peer), vector.Lines)
		if address != netip.MustParseAddr(vector.Address).Unmap() || addressSubject(address) != vector.Subject {
			t.Errorf("%+v: found %v, %s", vector, address, addressSubject(address))
		}
	}
}

func TestVectorsOfAnswers(t *testing.T) {
	for _, vector := range servers.LoadVectors(t).Answers {
		var demands []Demand
		reply := []int64{vector.AtUs, 1}
		for _, status := range vector.Limits {
			demands = append(demands, Demand{Key: "k" + status.Limit, Limit: status.Limit, Cost: status.Cost})
			allowed := int64(0)
			if status.Allowed {
				allowed = 1
			}
			reply = append(reply, allowed, status.Remaining, status.RetryAfterUs, status.NextAfterUs, status.ResetAfterUs, 0)
		}
		call, err := NewScriptCall(DefaultPrefix, Check{Demands: demands}, time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		decision, err := call.Decode(reply)
		if err != nil {
			t.Fatal(err)
		}
		headers := map[string]string{}
		for name, values := range decision.Header() {
			headers[strings.ToLower(name)] = strings.Join(values, ", ")
		}
		if _, isGiven := vector.Headers["content-type"]; !isGiven {
			delete(headers, "content-type")
		}
		if decision.StatusCode() != vector.Status || !reflect.DeepEqual(headers, vector.Headers) {
			t.Errorf("%+v: found %d %v", vector, decision.StatusCode(), headers)
		}
		if decision.Allowed {
			continue
		}
		var body map[string]any
		if err := json.Unmarshal([]byte(decision.Body()), &body); err != nil || !reflect.DeepEqual(body, vector.Body) {
			t.Errorf("%+v: found %v %v", vector, body, err)
		}
		var problem map[string]any
		if err := json.Unmarshal([]byte(encoded(decision.problem())), &problem); err != nil || !reflect.DeepEqual(problem, vector.Problem) {
			t.Errorf("%+v: found %v %v", vector, problem, err)
		}
	}
}

func TestVectorsOfAccept(t *testing.T) {
	for _, vector := range servers.LoadVectors(t).Accepts {
		if asksForProblem(vector.Lines) != vector.Problem {
			t.Errorf("%q: found %v", vector.Lines, !vector.Problem)
		}
	}
}

func TestScriptIsThatOfTheServer(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(servers.Root(), "crates", "tidegate-redis", "lua", "tidegate.lua"))
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != Script() {
		t.Error("clients/go/tidegate.lua differs from crates/tidegate-redis/lua/tidegate.lua; run clients/sync-script.sh")
	}
	if want := servers.LoadVectors(t).ScriptSHA1; want != "" && want != ScriptSHA1() {
		t.Errorf("the script's SHA-1 is %s, want %s", ScriptSHA1(), want)
	}
}
