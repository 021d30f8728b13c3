// Command mixedworker is a worker of the mixed run: one of the Go clients, alongside those of the other languages. The
// parent, crates/tidegate-cli/tests/suite/mixed.rs, describes the arguments, the input and the records.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math/rand"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"tidegate"
	"tidegate/redislimiter"
)

const callers = 8

type description struct {
	Client    string   `json:"client"`
	Service   string   `json:"service"`
	RedisPort int      `json:"redis_port"`
	Records   string   `json:"records"`
	Seed      int64    `json:"seed"`
	Keys      int      `json:"keys"`
	Limits    []string `json:"limits"`
	Journal   string   `json:"journal"`
	Checks    int      `json:"checks"`
}

func open(work description) tidegate.Limiter {
	switch work.Client {
	case "service":
		return tidegate.New(work.Service, tidegate.WithDeadline(time.Minute), tidegate.WithOnError(tidegate.ReturnError))
	case "go-redis":
		// Redis is allowed to be slow here, but a call must not be repeated: it could be charged twice.
		rdb := redis.NewClient(&redis.Options{Addr: fmt.Sprintf("127.0.0.1:%d", work.RedisPort), MaxRetries: -1, ReadTimeout: time.Minute})
		return redislimiter.New(rdb, redislimiter.WithDeadline(time.Minute), redislimiter.WithOnError(tidegate.ReturnError))
	}
	log.Fatalf("unknown client: %s", work.Client)
	return nil
}

func main() {
	var work description
	if err := json.Unmarshal([]byte(os.Args[1]), &work); err != nil {
		log.Fatal(err)
	}
	client := open(work)
	file, err := os.Create(work.Records)
	if err != nil {
		log.Fatal(err)
	}
	records := bufio.NewWriter(file)
	fmt.Println("ready")
	input := bufio.NewReader(os.Stdin)
	if _, err := input.ReadString('\n'); err != nil {
		log.Fatal(err)
	}
	var isOver atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, input)
		isOver.Store(true)
	}()
	var mutex sync.Mutex
	var all sync.WaitGroup
	made := 0
	for caller := int64(0); caller < callers; caller++ {
		random := rand.New(rand.NewSource(work.Seed + caller))
		all.Add(1)
		go func() {
			defer all.Done()
			for !isOver.Load() {
				record := check(client, work, random)
				mutex.Lock()
				_, _ = fmt.Fprintln(records, record)
				if made++; made == work.Checks {
					fmt.Println("made")
				}
				mutex.Unlock()
			}
		}()
	}
	all.Wait()
	if err := records.Flush(); err != nil {
		log.Fatal(err)
	}
}

// check makes a random check and returns its record.
func check(client tidegate.Limiter, work description, random *rand.Rand) string {
	counter := random.Intn(work.Keys)
	cost := []int64{1, 1, 1, 2, 3}[random.Intn(5)]
	demands := tidegate.CheckOf(fmt.Sprintf("client-%d", counter), cost, work.Limits[counter%len(work.Limits)], work.Journal)
	sent := time.Now()
	decision, err := client.Do(context.Background(), demands)
	received := time.Now()
	if err != nil {
		log.Fatal(err)
	}
	allowed := 0
	if decision.Allowed {
		allowed = 1
	}
	status, journal := decision.Limits[0], decision.Limits[1]
	return fmt.Sprintf("%d %d %d %d %d %d %d %d %s", sent.UnixMicro(), received.UnixMicro(), counter, cost, allowed,
		status.Remaining, status.RetryAfter.Microseconds(), journal.Remaining, decision.Source)
}
