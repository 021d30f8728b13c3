package redislimiter_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"tidegate"
	"tidegate/internal/servers"
	"tidegate/redislimiter"
)

var ctx = context.Background()

// connect returns a client of the server at this socket.
func connect(t *testing.T, socket string, change ...func(*redis.Options)) *redis.Client {
	options := &redis.Options{Network: "unix", Addr: socket, MaxRetries: -1, DialTimeout: time.Second, ReadTimeout: time.Second}
	for _, change := range change {
		change(options)
	}
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// start starts a server and returns its client and a limiter with a generous deadline that returns errors.
func start(t *testing.T, options ...redislimiter.Option) (*redis.Client, *redislimiter.Limiter) {
	socket := servers.Socket(t)
	servers.Redis(t, socket)
	client := connect(t, socket, func(o *redis.Options) { o.ReadTimeout = servers.Patience })
	options = append([]redislimiter.Option{redislimiter.WithDeadline(servers.Patience), redislimiter.WithOnError(tidegate.ReturnError), redislimiter.WithLogger(silent())}, options...)
	return client, redislimiter.New(client, options...)
}

func silent() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func TestVectorsOfTraces(t *testing.T) {
	for _, program := range []string{"redis-server", "valkey-server"} {
		t.Run(program, func(t *testing.T) {
			socket := servers.Socket(t)
			servers.Store(t, program, socket)
			replayTraces(t, connect(t, socket, func(o *redis.Options) { o.ReadTimeout = servers.Patience }), false)
		})
	}
}

// replayTraces replays all traces and compares every decision. The number of the trace is appended to its keys, so that
// the counters of a cluster are in many slots. A cluster rejects checks of several keys, and a trace ends there.
func replayTraces(t *testing.T, client redis.UniversalClient, isCluster bool) {
	t.Helper()
	var now time.Time
	limiter := redislimiter.New(client, redislimiter.WithPrefix("traces"), redislimiter.WithDeadline(servers.Patience),
		redislimiter.WithOnError(tidegate.ReturnError), redislimiter.WithLogger(silent()), redislimiter.WithClock(func() time.Time { return now }))
	for number, trace := range servers.LoadVectors(t).Traces {
		key := func(keyHex string) string {
			bytes, err := hex.DecodeString(keyHex)
			if err != nil {
				t.Fatal(err)
			}
			return fmt.Sprintf("%s:%d", bytes, number)
		}
		decisions := make([]tidegate.Decision, len(trace.Steps))
	steps:
		for index, step := range trace.Steps {
			now = time.UnixMicro(step.AtUs)
			var err error
			switch {
			case step.Refund != nil:
				err = limiter.Refund(ctx, decisions[*step.Refund])
			case step.Reset != nil:
				err = limiter.Reset(ctx, key(step.Reset.KeyHex), step.Reset.Limit)
			default:
				var check tidegate.Check
				hasSeveralKeys := false
				for _, demand := range step.Check {
					check.Demands = append(check.Demands, tidegate.Demand{Key: key(demand.KeyHex), Limit: demand.Limit, Cost: demand.Cost})
					hasSeveralKeys = hasSeveralKeys || demand.KeyHex != step.Check[0].KeyHex
				}
				decisions[index], err = limiter.Do(ctx, check)
				if isCluster && hasSeveralKeys {
					if !errors.Is(err, tidegate.ErrInvalid) || !strings.Contains(err.Error(), "use one key per check") {
						t.Fatalf("%s, step %d: %v is not ErrInvalid", trace.Name, index, err)
					}
					break steps
				}
			}
			if err != nil {
				t.Fatalf("%s, step %d: %v", trace.Name, index, err)
			}
			var found []servers.Status
			for _, status := range decisions[index].Limits {
				found = append(found, servers.Status{
					Allowed: status.Allowed, Remaining: status.Remaining,
					RetryAfterUs: us(status.RetryAfter), NextAfterUs: us(status.NextAfter), ResetAfterUs: us(status.ResetAfter),
				})
			}
			if decisions[index].Allowed != step.Allowed || !reflect.DeepEqual(found, step.Limits) {
				t.Fatalf("%s, step %d: found %v %+v, want %v %+v", trace.Name, index, decisions[index].Allowed, found, step.Allowed, step.Limits)
			}
		}
	}
}

func us(wait time.Duration) int64 {
	if wait == tidegate.Never {
		return -1
	}
	return wait.Microseconds()
}

func TestParallelChecksAdmitExactlyTheQuota(t *testing.T) {
	_, limiter := start(t)
	var admitted atomic.Int64
	var group sync.WaitGroup
	for range 200 {
		group.Add(1)
		go func() {
			defer group.Done()
			decision, err := limiter.Check(ctx, "\x00 {key}", "50/h", "1000/day")
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
}

func TestCallsLeakNothing(t *testing.T) {
	client, limiter := start(t)
	calls := 4_000
	if os.Getenv("TIDEGATE_LONG") != "" {
		calls = 100_000
	}
	run := func(calls int) (heap uint64) {
		var group sync.WaitGroup
		for range 200 {
			group.Add(1)
			go func() {
				defer group.Done()
				for range calls / 200 {
					if _, err := limiter.Check(ctx, "a", "10/h"); err != nil {
						t.Error(err)
					}
				}
			}()
		}
		group.Wait()
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	before := run(1_000)
	after := run(calls)
	if after > before+1<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}
	if count := client.PoolStats().TotalConns; int(count) > client.Options().PoolSize {
		t.Errorf("%d connections", count)
	}
	servers.Eventually(t, "the goroutines of calls to end", func() bool { return runtime.NumGoroutine() < 50 })
}

func TestScriptIsSentAgainAfterTheServerForgotIt(t *testing.T) {
	client, limiter := start(t)
	for want := int64(9); want >= 7; want-- {
		decision, err := limiter.Check(ctx, "a", "10/h")
		if err != nil || decision.Remaining != want || decision.Source != tidegate.SourceStore {
			t.Fatalf("%+v %v", decision, err)
		}
		if err := client.ScriptFlush(ctx).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPeekResetAndRefund(t *testing.T) {
	_, limiter := start(t)
	remaining := func() int64 {
		decision, err := limiter.Peek(ctx, "a", "10/h")
		if err != nil {
			t.Fatal(err)
		}
		return decision.Remaining
	}
	first, err := limiter.CheckN(ctx, "a", 4, "10/h")
	if err != nil || remaining() != 6 {
		t.Fatalf("%+v %v", first, err)
	}
	for range 2 {
		if err := limiter.Refund(ctx, first); err != nil || remaining() != 10 {
			t.Fatalf("%d %v", remaining(), err)
		}
	}
	denial, err := limiter.CheckN(ctx, "a", 11, "10/h")
	if err != nil || denial.Allowed || denial.RetryAfter != tidegate.Never {
		t.Fatalf("%+v %v", denial, err)
	}
	if _, err := limiter.CheckN(ctx, "a", 7, "10/h"); err != nil || remaining() != 3 {
		t.Fatal(err)
	}
	if err := limiter.Refund(ctx, denial); err != nil || remaining() != 3 {
		t.Fatalf("a refund of a denial: %d %v", remaining(), err)
	}
	if err := limiter.Reset(ctx, "a", "10/h"); err != nil || remaining() != 10 {
		t.Fatalf("%d %v", remaining(), err)
	}
}

func TestBannedSubjectIsRefusedAndNotCharged(t *testing.T) {
	client, limiter := start(t, redislimiter.WithPrefix("shop"))
	if err := client.Set(ctx, "shop:tg2:{a}:ban", 1, time.Hour).Err(); err != nil {
		t.Fatal(err)
	}
	decision, err := limiter.Check(ctx, "a", "10/h")
	if err != nil || decision.Allowed || decision.Reason != tidegate.Banned || decision.StatusCode() != 403 || decision.RetryAfter <= 0 {
		t.Errorf("%+v %v", decision, err)
	}
	if peek, err := limiter.Peek(ctx, "a", "10/h"); err != nil || !peek.Allowed || peek.Remaining != 10 {
		t.Errorf("%+v %v", peek, err)
	}
}

func TestWaitIsAdmittedWhenUnitsAreBack(t *testing.T) {
	_, limiter := start(t)
	for range 3 {
		decision, err := limiter.Wait(ctx, servers.Patience, "a", "1/20ms")
		if err != nil || !decision.Allowed {
			t.Fatalf("%+v %v", decision, err)
		}
	}
	for range 3 {
		decision, err := limiter.Wait(ctx, servers.Patience, "b", "100/s leaky-bucket")
		if err != nil || !decision.Allowed || decision.RetryAfter != 0 {
			t.Fatalf("%+v %v", decision, err)
		}
	}
	if _, err := limiter.Check(ctx, "c", "1/h"); err != nil {
		t.Fatal(err)
	}
	decision, err := limiter.Wait(ctx, time.Second, "c", "1/h")
	if err != nil || decision.Allowed || decision.RetryAfter < time.Minute {
		t.Fatalf("a wait that is too long: %+v %v", decision, err)
	}
	cancelled, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, _ = limiter.Check(ctx, "d", "1/20s")
	if _, err := limiter.Wait(cancelled, servers.Patience, "d", "1/20s"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait that is cancelled: %v", err)
	}
}

func TestTooLateLeakyBucketIsRefunded(t *testing.T) {
	_, limiter := start(t)
	for want := range 3 {
		decision, err := limiter.Wait(ctx, time.Millisecond, "a", "1/h leaky-bucket queue=10")
		if err != nil || decision.Allowed != (want == 0) {
			t.Fatalf("%d: %+v %v", want, decision, err)
		}
	}
	if peek, err := limiter.Peek(ctx, "a", "1/h leaky-bucket queue=10"); err != nil || peek.Remaining != 10 {
		t.Errorf("%+v %v", peek, err)
	}
}

func TestErrorsOfTheServerHaveKinds(t *testing.T) {
	client, limiter := start(t)
	if err := client.Set(ctx, "tidegate:tg2:{foreign}:sliding:3600000000", "text", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Check(ctx, "foreign", "10/h"); !errors.Is(err, tidegate.ErrForeign) || strings.Contains(err.Error(), "tg2") {
		t.Errorf("a key of another type: %v", err)
	}

	if err := client.Do(ctx, "ACL", "SETUSER", "limited", "on", ">secret", "~*", "+ping", "+hello", "+client").Err(); err != nil {
		t.Fatal(err)
	}
	user := connect(t, client.Options().Addr, func(o *redis.Options) { o.Username, o.Password = "limited", "secret" })
	forbidden := redislimiter.New(user, redislimiter.WithDeadline(servers.Patience), redislimiter.WithOnError(tidegate.ReturnError), redislimiter.WithLogger(silent()))
	if _, err := forbidden.Check(ctx, "a", "10/h"); !errors.Is(err, tidegate.ErrForbidden) {
		t.Errorf("NOPERM: %v", err)
	}
	wrong := connect(t, client.Options().Addr, func(o *redis.Options) { o.Username, o.Password = "limited", "wrong" })
	unknown := redislimiter.New(wrong, redislimiter.WithDeadline(servers.Patience), redislimiter.WithOnError(tidegate.ReturnError), redislimiter.WithLogger(silent()))
	if _, err := unknown.Check(ctx, "a", "10/h"); !errors.Is(err, tidegate.ErrForbidden) {
		t.Errorf("WRONGPASS: %v", err)
	}
	if err := client.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Check(ctx, "a", "10/h"); !errors.Is(err, tidegate.ErrUnavailable) {
		t.Errorf("OOM: %v", err)
	}
}

func TestBadInputIsErrInvalid(t *testing.T) {
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	for i, call := range []func() error{
		func() error { _, err := redislimiter.New(client).Check(ctx, "a"); return err },
		func() error { _, err := redislimiter.New(client).Check(ctx, "a", "ten"); return err },
		func() error { _, err := redislimiter.New(client).CheckN(ctx, "a", -1, "1/s"); return err },
		func() error { _, err := redislimiter.New(client).Wait(ctx, time.Hour, "a", "1/s"); return err },
		func() error { return redislimiter.New(client).Reset(ctx, "a", "ten") },
		func() error {
			_, err := redislimiter.New(client, redislimiter.WithPrefix("{")).Check(ctx, "a", "1/s")
			return err
		},
		func() error {
			_, err := redislimiter.New(client, redislimiter.WithDeadline(0)).Check(ctx, "a", "1/s")
			return err
		},
	} {
		if err := call(); !errors.Is(err, tidegate.ErrInvalid) {
			t.Errorf("%d: %v is not ErrInvalid", i, err)
		}
	}
}

func TestRedisThatWasKilledOrStoppedIsUsedAgainWhenItIsBack(t *testing.T) {
	socket := servers.Socket(t)
	server := servers.Redis(t, socket)
	client := connect(t, socket)
	var log, whileKilled lockedBuilder
	strict := redislimiter.New(client, redislimiter.WithOnError(tidegate.ReturnError), redislimiter.WithLogger(silent()))
	open := redislimiter.New(client, redislimiter.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	closed := redislimiter.New(client, redislimiter.WithOnError(tidegate.Deny), redislimiter.WithLogger(slog.New(slog.NewTextHandler(&whileKilled, nil))))
	answers := func() bool { _, err := strict.Check(ctx, "a", "1000000/h"); return err == nil }
	servers.Eventually(t, "an answer", answers)

	server.Pause()
	servers.Eventually(t, "a failure", func() bool { return !answers() })
	decision, err := open.Check(ctx, "a", "1000000/h")
	if err != nil || !decision.Allowed || !errors.Is(decision.Err, tidegate.ErrUnavailable) || decision.Source != tidegate.SourceNone {
		t.Errorf("stopped: %+v %v", decision, err)
	}
	if !strings.Contains(log.String(), "did not answer within 25ms") {
		t.Errorf("log: %s", log.String())
	}
	server.Resume()
	servers.Eventually(t, "an answer after SIGCONT", answers)

	server.Kill()
	decision, err = closed.Check(ctx, "a", "1000000/h")
	if err != nil || decision.Allowed || decision.StatusCode() != 503 || !errors.Is(decision.Err, tidegate.ErrUnavailable) || whileKilled.String() == "" {
		t.Errorf("killed: %+v %v, log %s", decision, err, whileKilled.String())
	}
	servers.Redis(t, socket)
	servers.Eventually(t, "an answer of the new process", answers)
	servers.Eventually(t, "the goroutines of late calls to end", func() bool { return runtime.NumGoroutine() < 50 })
}

// lockedBuilder is a buffer for the log, which is written by several goroutines.
type lockedBuilder struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuilder) Write(bytes []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(bytes)
}

func (b *lockedBuilder) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func TestRepliesOfAnotherProgramAreErrProtocol(t *testing.T) {
	listener, err := net.Listen("unix", servers.Socket(t))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer connection.Close()
				buffer := make([]byte, 64*1024)
				for {
					count, err := connection.Read(buffer)
					if err != nil {
						return
					}
					reply := "-ERR unknown command\r\n"
					if strings.Contains(string(buffer[:count]), "evalsha") {
						reply = "*2\r\n$1\r\na\r\n:1\r\n"
					}
					if _, err := io.WriteString(connection, reply); err != nil {
						return
					}
				}
			}()
		}
	}()
	client := connect(t, listener.Addr().String(), func(o *redis.Options) { o.Protocol, o.DisableIndentity = 2, true })
	limiter := redislimiter.New(client, redislimiter.WithDeadline(servers.Patience), redislimiter.WithOnError(tidegate.ReturnError), redislimiter.WithLogger(silent()))
	if _, err := limiter.Check(ctx, "a", "10/h"); !errors.Is(err, tidegate.ErrProtocol) {
		t.Errorf("%v is not ErrProtocol", err)
	}
}
