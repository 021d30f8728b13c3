// Bench compares the script client with go-redis/redis_rate, on a Redis server of its own:
//
//	GOWORK=off go run . [-rounds 5] [-seconds 2] [-parallel 64]
//
// The rounds of all candidates are interleaved, so that other load on the machine affects all of them. It prints the
// median of the rounds: requests per second, and the CPU time of Redis per request (INFO cpu).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"

	"tidegate"
	"tidegate/redislimiter"
)

var (
	rounds   = flag.Int("rounds", 5, "rounds of each candidate")
	seconds  = flag.Float64("seconds", 2, "seconds of each round")
	parallel = flag.Int("parallel", 64, "parallel callers")
	keys     = flag.Int("keys", 10_000, "number of keys")
)

// candidate is a way to decide a request. Its guarantee is what its documentation says.
type candidate struct {
	name, guarantee string
	check           func(ctx context.Context, key string) error
}

// result is one round of a candidate.
type result struct{ perSecond, cpuMicros float64 }

func main() {
	flag.Parse()
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	client, stop, err := startRedis()
	if err != nil {
		return err
	}
	defer stop()
	results := map[string][]result{}
	candidates := candidatesOn(client)
	for range *rounds {
		for _, candidate := range candidates {
			measured, err := measure(client, candidate)
			if err != nil {
				return fmt.Errorf("%s: %w", candidate.name, err)
			}
			results[candidate.name] = append(results[candidate.name], measured)
		}
	}
	fmt.Printf("%d callers, %d keys, 1000 requests per minute and key, median of %d rounds of %g s\n\n", *parallel, *keys, *rounds, *seconds)
	fmt.Printf("| | requests/s | Redis CPU per request | guarantee |\n|---|---|---|---|\n")
	for _, candidate := range candidates {
		measured := results[candidate.name]
		perSecond := median(measured, func(r result) float64 { return r.perSecond })
		cpu := median(measured, func(r result) float64 { return r.cpuMicros })
		fmt.Printf("| %s | %.0f | %.1f µs | %s |\n", candidate.name, perSecond, cpu, candidate.guarantee)
	}
	return nil
}

func candidatesOn(client *redis.Client) []candidate {
	rate := redis_rate.NewLimiter(client)
	limiter := redislimiter.New(client, redislimiter.WithDeadline(10*time.Second), redislimiter.WithOnError(tidegate.ReturnError))
	script := func(limits ...string) func(context.Context, string) error {
		return func(ctx context.Context, key string) error {
			_, err := limiter.Check(ctx, key, limits...)
			return err
		}
	}
	return []candidate{
		{"redis_rate", "average rate with bursts (GCRA); no bans; no deadline", func(ctx context.Context, key string) error {
			_, err := rate.Allow(ctx, key, redis_rate.PerMinute(1000))
			return err
		}},
		{"redislimiter, token-bucket", "average rate with bursts; bans are read; 25 ms deadline", script("1000/min token-bucket")},
		{"redislimiter, sliding", "never more than the quota in any trailing window; bans are read; 25 ms deadline", script("1000/min")},
		{"redis_rate, two limits", "two calls: a denial by the second limit has charged the first", func(ctx context.Context, key string) error {
			if _, err := rate.Allow(ctx, "minute:"+key, redis_rate.PerMinute(1000)); err != nil {
				return err
			}
			_, err := rate.Allow(ctx, "hour:"+key, redis_rate.PerHour(50_000))
			return err
		}},
		{"redislimiter, two limits", "one call: both limits are charged or none", script("1000/min token-bucket", "50000/h token-bucket")},
	}
}

// measure runs one round and returns its rate and the CPU time that Redis spent per request.
func measure(client *redis.Client, candidate candidate) (result, error) {
	ctx := context.Background()
	if err := client.FlushAll(ctx).Err(); err != nil {
		return result{}, err
	}
	before, err := cpuSeconds(client)
	if err != nil {
		return result{}, err
	}
	var count atomic.Int64
	var group sync.WaitGroup
	errs := make(chan error, *parallel)
	start := time.Now()
	end := start.Add(time.Duration(*seconds * float64(time.Second)))
	for caller := range *parallel {
		group.Add(1)
		go func() {
			defer group.Done()
			for number := caller; time.Now().Before(end); number += *parallel {
				if err := candidate.check(ctx, "user:"+strconv.Itoa(number%*keys)); err != nil {
					errs <- err
					return
				}
				count.Add(1)
			}
		}()
	}
	group.Wait()
	elapsed := time.Since(start).Seconds()
	after, err := cpuSeconds(client)
	if err != nil {
		return result{}, err
	}
	select {
	case err := <-errs:
		return result{}, err
	default:
	}
	requests := float64(count.Load())
	return result{requests / elapsed, (after - before) * 1e6 / requests}, nil
}

// cpuSeconds returns the CPU time that Redis has used.
func cpuSeconds(client *redis.Client) (float64, error) {
	info, err := client.Info(context.Background(), "cpu").Result()
	if err != nil {
		return 0, err
	}
	total, found := 0.0, 0
	for _, line := range strings.Split(info, "\r\n") {
		name, value, _ := strings.Cut(line, ":")
		if name == "used_cpu_sys" || name == "used_cpu_user" {
			number, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, err
			}
			total, found = total+number, found+1
		}
	}
	if found != 2 {
		return 0, errors.New("INFO cpu has no CPU times")
	}
	return total, nil
}

func median(results []result, of func(result) float64) float64 {
	values := make([]float64, len(results))
	for i, result := range results {
		values[i] = of(result)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// startRedis starts the redis-server of the PATH on a Unix socket.
func startRedis() (*redis.Client, func(), error) {
	dir, err := os.MkdirTemp("", "tidegate")
	if err != nil {
		return nil, nil, err
	}
	socket := filepath.Join(dir, "s")
	server := exec.Command("redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--dir", dir)
	if err := server.Start(); err != nil {
		return nil, nil, fmt.Errorf("redis-server: %w; put .tools/bin into the PATH", err)
	}
	for range 1000 {
		if connection, err := net.Dial("unix", socket); err == nil {
			_ = connection.Close()
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	client := redis.NewClient(&redis.Options{Network: "unix", Addr: socket, MaxRetries: -1, PoolSize: *parallel})
	stop := func() {
		_ = client.Close()
		_ = server.Process.Kill()
		_ = server.Wait()
		_ = os.RemoveAll(dir)
	}
	return client, stop, nil
}
