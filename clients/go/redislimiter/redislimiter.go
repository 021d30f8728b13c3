// Package redislimiter decides checks in Redis or Valkey, with Tidegate's Lua script on a go-redis client.
//
//	limiter := redislimiter.New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", MaxRetries: -1}))
//	decision, err := limiter.Check(ctx, "user:42", "10/min", "1000/day")
//
// The script decides by the clock of the server, and on the same counters as the service and all other clients with the
// same prefix. Redis 7.0 or Valkey 7.2, or a later version, is required. On a Redis Cluster all limits of a check must
// be on the same key, so that its counters are in one slot.
//
// Set MaxRetries to -1: go-redis otherwise repeats a call whose answer was lost, which may charge twice. For a
// redis.ClusterClient, -1 is the default.
package redislimiter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"

	"tidegate"
)

// DefaultDeadline is the default deadline of a call to Redis.
const DefaultDeadline = 25 * time.Millisecond

// pauseMin is the shortest pause between two checks of a wait.
const pauseMin = time.Millisecond

// Limiter decides checks in Redis. It is safe for concurrent use.
type Limiter struct {
	redis    redis.UniversalClient
	prefix   string
	deadline time.Duration
	failures tidegate.FailurePolicy
	now      func() time.Time
	err      error // of an invalid option
}

var _ tidegate.Limiter = (*Limiter)(nil)

// Option is an option of [New].
type Option func(*Limiter)

// WithPrefix sets the first part of all keys. Defaults to tidegate.
func WithPrefix(prefix string) Option { return func(l *Limiter) { l.prefix = prefix } }

// WithDeadline sets the deadline of each call, including connecting. Defaults to 25 ms.
func WithDeadline(deadline time.Duration) Option { return func(l *Limiter) { l.deadline = deadline } }

// WithOnError sets what happens if there is no verdict. Defaults to [tidegate.Allow].
func WithOnError(onError tidegate.OnError) Option {
	return func(l *Limiter) { l.failures.OnError = onError }
}

// WithLogger sets the logger for failures, which are logged at most once a second. Defaults to slog.Default.
func WithLogger(logger *slog.Logger) Option { return func(l *Limiter) { l.failures.Logger = logger } }

// WithClock sets the time of decisions, for tests. Defaults to the clock of the server.
func WithClock(now func() time.Time) Option { return func(l *Limiter) { l.now = now } }

// New creates a limiter on a Redis client. It does not connect. If an option is invalid, every call returns
// tidegate.ErrInvalid.
func New(client redis.UniversalClient, options ...Option) *Limiter {
	limiter := &Limiter{
		redis: client, prefix: tidegate.DefaultPrefix, deadline: DefaultDeadline, now: func() time.Time { return time.Time{} },
	}
	for _, option := range options {
		option(limiter)
	}
	limiter.err = tidegate.ValidatePrefix(limiter.prefix)
	if limiter.deadline <= 0 {
		limiter.err = &tidegate.Error{Kind: tidegate.ErrInvalid, Message: "expected a deadline above 0"}
	}
	return limiter
}

// Check takes one unit of each limit for the key, if all of them admit it.
func (l *Limiter) Check(ctx context.Context, key string, limits ...string) (tidegate.Decision, error) {
	return l.Do(ctx, tidegate.CheckOf(key, 1, limits...))
}

// CheckN takes cost units of each limit for the key, if all of them admit it.
func (l *Limiter) CheckN(ctx context.Context, key string, cost int64, limits ...string) (tidegate.Decision, error) {
	return l.Do(ctx, tidegate.CheckOf(key, cost, limits...))
}

// Peek returns the state of the limits for the key without charging anything.
func (l *Limiter) Peek(ctx context.Context, key string, limits ...string) (tidegate.Decision, error) {
	return l.Do(ctx, tidegate.CheckOf(key, 0, limits...))
}

// Wait takes one unit of each limit for the key, and waits for it up to maxWait. If the required wait is longer, the
// decision is a denial, made at once.
func (l *Limiter) Wait(ctx context.Context, maxWait time.Duration, key string, limits ...string) (tidegate.Decision, error) {
	check := tidegate.CheckOf(key, 1, limits...)
	check.MaxWait = maxWait
	return l.Do(ctx, check)
}

// Do decides a check.
func (l *Limiter) Do(ctx context.Context, check tidegate.Check) (tidegate.Decision, error) {
	if l.err != nil {
		return tidegate.Decision{}, l.err
	}
	call, err := tidegate.NewScriptCall(l.prefix, check, l.now())
	if err != nil {
		return tidegate.Decision{}, err
	}
	if check.MaxWait > 0 {
		return l.wait(ctx, call, check.MaxWait)
	}
	return l.decide(ctx, call)
}

// Refund gives back the units that an admission charged. It does nothing if the decision charged nothing, and when it is
// called again for the same decision, even after an error: the first call may have been executed.
func (l *Limiter) Refund(ctx context.Context, decision tidegate.Decision) error {
	call := tidegate.NewRefundCall(decision, l.now())
	if call == nil {
		return nil
	}
	_, err := l.run(ctx, call)
	return err
}

// Reset deletes the counters of the key for these limits.
func (l *Limiter) Reset(ctx context.Context, key string, limits ...string) error {
	if l.err != nil {
		return l.err
	}
	call, err := tidegate.NewScriptCall(l.prefix, tidegate.CheckOf(key, 0, limits...), time.Time{})
	if err != nil {
		return err
	}
	_, err = within(ctx, l.deadline, func(ctx context.Context) (int64, error) {
		return l.redis.Del(ctx, call.CounterKeys()...).Result()
	})
	return err
}

func (l *Limiter) decide(ctx context.Context, call *tidegate.ScriptCall) (tidegate.Decision, error) {
	reply, err := l.run(ctx, call)
	if err != nil {
		return l.failures.Apply(ctx, err)
	}
	decision, err := call.Decode(reply)
	if err != nil {
		return l.failures.Apply(ctx, err)
	}
	return decision, nil
}

// wait checks, sleeps for RetryAfter, which is exact, and checks again, until the check is admitted or would have to wait
// longer than maxWait.
func (l *Limiter) wait(ctx context.Context, call *tidegate.ScriptCall, maxWait time.Duration) (tidegate.Decision, error) {
	end := time.Now().Add(maxWait)
	for {
		decision, err := l.decide(ctx, call)
		if err != nil || decision.RetryAfter == 0 || decision.Err != nil {
			return decision, err
		}
		if decision.RetryAfter == tidegate.Never || decision.RetryAfter > time.Until(end) {
			if !decision.Allowed {
				return decision, nil
			}
			// The place in the leaky bucket is too far back.
			if err := l.Refund(ctx, decision); err != nil {
				return l.failures.Apply(ctx, err)
			}
			decision.Allowed, decision.Reason = false, tidegate.RateLimited
			return decision, nil
		}
		timer := time.NewTimer(max(decision.RetryAfter, pauseMin))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			if decision.Allowed {
				_ = l.Refund(context.WithoutCancel(ctx), decision) // the wait is cancelled even if this fails
			}
			return tidegate.Decision{}, &tidegate.Error{Kind: tidegate.ErrUnavailable, Message: "the wait was cancelled", Cause: ctx.Err()}
		}
		if decision.Allowed {
			decision.RetryAfter = 0
			return decision, nil
		}
	}
}

// run calls the script by its SHA-1, and once with its source if the server does not have it.
func (l *Limiter) run(ctx context.Context, call *tidegate.ScriptCall) ([]int64, error) {
	args := make([]any, len(call.Args))
	for i, arg := range call.Args {
		args[i] = arg
	}
	reply, err := within(ctx, l.deadline, func(ctx context.Context) (any, error) {
		cluster, isCluster := l.redis.(*redis.ClusterClient)
		if !isCluster {
			return evaluate(ctx, l.redis, call.Keys, args)
		}
		// A cluster client repeats a call whose answer was lost, so the client of the master sends the call. It does not
		// follow redirections. A node that redirects a call has not executed it, so the cluster client may send it again.
		master, err := cluster.MasterForKey(ctx, call.Keys[0])
		if err != nil {
			return nil, err
		}
		reply, err := evaluate(ctx, master, call.Keys, args)
		if err != nil && (redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK")) {
			return evaluate(ctx, cluster, call.Keys, args)
		}
		return reply, err
	})
	if err != nil {
		return nil, err
	}
	return integers(reply)
}

// evaluate runs the script by its hash, or by its source if the server does not have it cached.
func evaluate(ctx context.Context, client redis.Scripter, keys []string, args []any) (any, error) {
	reply, err := client.EvalSha(ctx, tidegate.ScriptSHA1(), keys, args...).Result()
	if err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		reply, err = client.Eval(ctx, tidegate.Script(), keys, args...).Result()
	}
	return reply, err
}

// integers converts a reply to the flat list of integers that the script returns.
func integers(reply any) ([]int64, error) {
	list, isList := reply.([]any)
	numbers := make([]int64, len(list))
	for i, element := range list {
		var isNumber bool
		numbers[i], isNumber = element.(int64)
		isList = isList && isNumber
	}
	if !isList {
		return nil, &tidegate.Error{Kind: tidegate.ErrProtocol, Message: "the script returned something other than integers"}
	}
	return numbers, nil
}

// within returns the result of a command, or an error at the deadline. go-redis reads without regard to the context
// unless ContextTimeoutEnabled is set, so the command runs in a goroutine, which the timeouts of the client end. The
// number of these goroutines is bounded by the client's pool, because waiting for a connection ends with the context.
func within[T any](ctx context.Context, deadline time.Duration, command func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	done := make(chan result, 1)
	go func() {
		defer cancel()
		value, err := command(ctx)
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, failure(r.err, deadline)
	case <-ctx.Done():
		select {
		case r := <-done: // finished at the same time
			return r.value, failure(r.err, deadline)
		default:
		}
		var none T
		return none, failure(ctx.Err(), deadline)
	}
}

// failure converts an error of go-redis.
func failure(err error, deadline time.Duration) error {
	var reply redis.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return &tidegate.Error{Kind: tidegate.ErrUnavailable, Message: fmt.Sprintf("Redis did not answer within %v", deadline), Cause: err}
	case errors.Is(err, redis.Nil):
		return &tidegate.Error{Kind: tidegate.ErrProtocol, Message: "Redis returned nothing"}
	case errors.As(err, &reply):
		return tidegate.ScriptError(err.Error())
	}
	return &tidegate.Error{Kind: tidegate.ErrUnavailable, Message: "cannot reach Redis", Cause: err}
}
