package redislimiter_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"tidegate"
	"tidegate/internal/servers"
	"tidegate/redislimiter"
)

// subjects is a number of keys of which each master has some.
const subjects = 40

// TestCluster tests the limiter on a Redis Cluster of three masters. Its tests share the cluster.
func TestCluster(t *testing.T) {
	t.Parallel() // with the cluster of Valkey
	cluster := servers.StartCluster(t, "redis")
	client := connectCluster(t, cluster)
	t.Run("traces", func(t *testing.T) { testClusterTraces(t, cluster) })
	t.Run("all methods work for the keys of all masters", func(t *testing.T) { testClusterMethods(t, client) })
	t.Run("a check of several keys is invalid and charges nothing", func(t *testing.T) { testClusterSeveralKeys(t, client) })
	t.Run("the script is sent once to each master", func(t *testing.T) { testClusterScript(t, cluster, client) })
	t.Run("counters follow a slot that moves", func(t *testing.T) { testClusterMove(t, cluster, client) })
	t.Run("a slot without a master is unavailable", func(t *testing.T) { testClusterDown(t, cluster, client) })
	t.Run("a call with a lost answer is not repeated", func(t *testing.T) { testClusterLostAnswer(t, cluster) })
	t.Run("the error of a client of one node names the cluster client", func(t *testing.T) { testClusterNode(t, cluster) })
	t.Run("the block of the README", func(t *testing.T) {
		program := replace(t, blocksOfTheReadme(t)[2], "127.0.0.1:6379", cluster.Addresses[0])
		if found := run(t, patientProgram(t, program)); found != "9 of 10 left\n" {
			t.Errorf("found %s", found)
		}
	})
}

func TestVectorsOfTracesOnAValkeyCluster(t *testing.T) {
	t.Parallel()
	testClusterTraces(t, servers.StartCluster(t, "valkey"))
}

// connectCluster returns a client of the cluster.
func connectCluster(t *testing.T, cluster *servers.Cluster, change ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	options := &redis.ClusterOptions{Addrs: []string{cluster.Addresses[0]}, ReadTimeout: servers.Patience}
	for _, change := range change {
		change(options)
	}
	client := redis.NewClusterClient(options)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// patient returns a limiter with a generous deadline that returns errors.
func patient(client redis.UniversalClient, options ...redislimiter.Option) *redislimiter.Limiter {
	own := []redislimiter.Option{redislimiter.WithDeadline(servers.Patience), redislimiter.WithOnError(tidegate.ReturnError), redislimiter.WithLogger(silent())}
	return redislimiter.New(client, append(own, options...)...)
}

func testClusterTraces(t *testing.T, cluster *servers.Cluster) {
	client := connectCluster(t, cluster)
	replayTraces(t, client, true)
	err := client.ForEachMaster(ctx, func(ctx context.Context, master *redis.Client) error {
		if count, err := master.DBSize(ctx).Result(); err != nil || count == 0 {
			return fmt.Errorf("a master has %d keys, %w", count, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func testClusterMethods(t *testing.T, client *redis.ClusterClient) {
	limiter := patient(client, redislimiter.WithPrefix("methods"))
	for n := range subjects {
		key := fmt.Sprintf("a b{c}%d", n)
		remaining := func() int64 {
			decision, err := limiter.Peek(ctx, key, "2/h", "9/day")
			if err != nil {
				t.Fatal(err)
			}
			return decision.Remaining
		}
		admission, err := limiter.CheckN(ctx, key, 2, "2/h", "9/day")
		if err != nil || !admission.Allowed || remaining() != 0 {
			t.Fatalf("%+v %v", admission, err)
		}
		if err := limiter.Refund(ctx, admission); err != nil || remaining() != 2 {
			t.Fatalf("a refund: %v", err)
		}
		if _, err := limiter.Check(ctx, key, "2/h", "9/day"); err != nil || remaining() != 1 {
			t.Fatal(err)
		}
		if err := limiter.Reset(ctx, key, "2/h", "9/day"); err != nil || remaining() != 2 {
			t.Fatalf("a reset: %v", err)
		}
	}
	if err := client.Set(ctx, "methods:tg2:{banned}:ban", 1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	if decision, err := limiter.Check(ctx, "banned", "2/h"); err != nil || decision.Reason != tidegate.Banned {
		t.Errorf("%+v %v", decision, err)
	}
}

func testClusterSeveralKeys(t *testing.T, client *redis.ClusterClient) {
	var check tidegate.Check
	for n := range 10 {
		check.Demands = append(check.Demands, tidegate.Demand{Key: fmt.Sprintf("several%d", n), Limit: "9/h", Cost: 1})
	}
	for _, onError := range []tidegate.OnError{tidegate.Allow, tidegate.ReturnError} {
		_, err := patient(client, redislimiter.WithOnError(onError)).Do(ctx, check)
		if !errors.Is(err, tidegate.ErrInvalid) || !strings.Contains(err.Error(), "use one key per check") {
			t.Errorf("%v is not ErrInvalid", err)
		}
	}
	for _, demand := range check.Demands {
		if decision, err := patient(client).Peek(ctx, demand.Key, demand.Limit); err != nil || decision.Remaining != 9 {
			t.Errorf("%+v %v", decision, err)
		}
	}
}

func testClusterScript(t *testing.T, cluster *servers.Cluster, client *redis.ClusterClient) {
	limiter := patient(client, redislimiter.WithPrefix("sent"))
	onEach := func(command func(*redis.Client) error) {
		for _, address := range cluster.Addresses {
			master := redis.NewClient(&redis.Options{Addr: address})
			if err := command(master); err != nil {
				t.Fatal(err)
			}
			_ = master.Close()
		}
	}
	onEach(func(master *redis.Client) error {
		return errors.Join(master.ScriptFlush(ctx).Err(), master.ConfigResetStat(ctx).Err())
	})
	for _, want := range []int64{8, 7} {
		for n := range subjects {
			if decision, err := limiter.Check(ctx, fmt.Sprint(n), "9/h"); err != nil || decision.Remaining != want {
				t.Fatalf("%+v %v", decision, err)
			}
		}
	}
	onEach(func(master *redis.Client) error {
		stats, err := master.Info(ctx, "commandstats").Result()
		if !strings.Contains(stats, "cmdstat_eval:calls=1,") {
			t.Errorf("the script was not sent once: %s", stats)
		}
		return err
	})
}

func testClusterMove(t *testing.T, cluster *servers.Cluster, client *redis.ClusterClient) {
	limiter := patient(client)
	if decision, err := limiter.Check(ctx, "moving", "9/h"); err != nil || decision.Remaining != 8 {
		t.Fatalf("%+v %v", decision, err)
	}
	cluster.Run(t, "begin-move", "{moving}")
	// The node has the counter, but not the key of the ban: it rejects the call with TRYAGAIN.
	if _, err := limiter.Check(ctx, "moving", "9/h"); !errors.Is(err, tidegate.ErrUnavailable) || !strings.Contains(err.Error(), "TRYAGAIN") {
		t.Errorf("%v is not ErrUnavailable", err)
	}
	decision, err := patient(client, redislimiter.WithOnError(tidegate.Allow)).Check(ctx, "moving", "9/h")
	if err != nil || !decision.Allowed || decision.Source != tidegate.SourceNone {
		t.Errorf("%+v %v", decision, err)
	}
	// A key that no node has yet is on the other master.
	if decision, err := limiter.Peek(ctx, "moving", "9/day"); err != nil || decision.Remaining != 9 {
		t.Errorf("a redirection with ASK: %+v %v", decision, err)
	}
	cluster.Run(t, "end-move", "{moving}")
	if decision, err := limiter.Check(ctx, "moving", "9/h"); err != nil || decision.Remaining != 7 {
		t.Errorf("calls without a verdict charge nothing: %+v %v", decision, err)
	}
}

func testClusterDown(t *testing.T, cluster *servers.Cluster, client *redis.ClusterClient) {
	limiter := patient(client)
	if _, err := limiter.Check(ctx, "dropped", "9/h"); err != nil {
		t.Fatal(err)
	}
	cluster.Run(t, "drop-slot", "{dropped}")
	if _, err := limiter.Check(ctx, "dropped", "9/h"); !errors.Is(err, tidegate.ErrUnavailable) || !strings.Contains(err.Error(), "CLUSTERDOWN") {
		t.Errorf("%v is not ErrUnavailable", err)
	}
	decision, err := patient(client, redislimiter.WithOnError(tidegate.Deny)).Check(ctx, "dropped", "9/h")
	if err != nil || decision.Allowed || decision.StatusCode() != 503 {
		t.Errorf("%+v %v", decision, err)
	}
	cluster.Run(t, "restore-slot", "{dropped}")
	if decision, err := limiter.Check(ctx, "dropped", "9/h"); err != nil || decision.Remaining != 7 {
		t.Errorf("%+v %v", decision, err)
	}
}

// lossyConn discards the next answer to a script call after armed was set, and closes, as if the connection were lost.
type lossyConn struct {
	net.Conn
	armed  *atomic.Bool
	called bool
}

func (c *lossyConn) Write(text []byte) (int, error) {
	c.called = bytes.Contains(text, []byte("evalsha"))
	return c.Conn.Write(text)
}

func (c *lossyConn) Read(buffer []byte) (int, error) {
	count, err := c.Conn.Read(buffer)
	if c.called && c.armed.Swap(false) {
		_ = c.Close()
		return 0, io.EOF
	}
	return count, err
}

func testClusterLostAnswer(t *testing.T, cluster *servers.Cluster) {
	var armed atomic.Bool
	client := connectCluster(t, cluster, func(o *redis.ClusterOptions) {
		o.Dialer = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
			return &lossyConn{Conn: conn, armed: &armed}, err
		}
	})
	limiter := patient(client)
	if decision, err := limiter.Check(ctx, "lost", "9/h"); err != nil || decision.Remaining != 8 {
		t.Fatalf("%+v %v", decision, err)
	}
	armed.Store(true)
	if _, err := limiter.Check(ctx, "lost", "9/h"); !errors.Is(err, tidegate.ErrUnavailable) || armed.Load() {
		t.Errorf("%v is not ErrUnavailable", err)
	}
	if decision, err := limiter.Peek(ctx, "lost", "9/h"); err != nil || decision.Remaining != 7 {
		t.Errorf("charged more than once: %+v %v", decision, err)
	}
}

func testClusterNode(t *testing.T, cluster *servers.Cluster) {
	rejected := 0
	for _, address := range cluster.Addresses {
		node := redis.NewClient(&redis.Options{Addr: address, MaxRetries: -1})
		_, err := patient(node).Check(ctx, "k", "9/h")
		_ = node.Close()
		if err == nil {
			continue
		}
		rejected++
		if !errors.Is(err, tidegate.ErrUnavailable) || !strings.Contains(err.Error(), "use a cluster client") || strings.Contains(err.Error(), "tg2") {
			t.Errorf("%v", err)
		}
	}
	if rejected != 2 {
		t.Errorf("%d of 3 masters rejected the key", rejected)
	}
}
