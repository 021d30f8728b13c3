<?php

declare(strict_types=1);

namespace Tidegate;

use Predis\ClientInterface;
use Psr\Log\LoggerInterface;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\TidegateException;
use Tidegate\Exception\Unavailable;
use Tidegate\Redis\Connection;
use Tidegate\Redis\ErrorReply;
use Tidegate\Redis\PhpRedis;
use Tidegate\Redis\Predis;

/**
 * Decides checks in Redis or Valkey with Tidegate's Lua script, by the clock of the server, on the same counters as the
 * service and all other clients with the same prefix. Redis 7.0 or Valkey 7.2, or a later version, is required. In a
 * Redis Cluster all limits of a check must be on the same key.
 */
final class RedisLimiter extends Limiter
{
    /** The shortest pause between two checks of a wait, in microseconds. */
    private const PAUSE_MIN_US = 1_000;

    private readonly Connection $connection;
    private readonly FailurePolicy $failures;

    /**
     * @param \Redis|\RedisCluster|ClientInterface $redis a phpredis or Predis client; its key prefix and serializer
     *     are not used
     * @param string $prefix the first part of all keys
     * @param float $deadline the deadline of each call in seconds. It bounds reading; connecting is bounded by the
     *     client's own timeout, and so is reading with a RedisCluster, and after a redirection with Predis
     * @param string $onError what happens without a verdict: allow, deny (503) or raise
     * @param ?LoggerInterface $logger for failures, at most once a second; null for error_log
     * @param ?\Closure(): int $clock returns the time in microseconds, for tests; null for the server's clock
     * @throws Invalid if an argument is not accepted
     */
    public function __construct(
        \Redis|\RedisCluster|ClientInterface $redis,
        private readonly string $prefix = 'tidegate',
        private readonly float $deadline = 0.025,
        string $onError = FailurePolicy::ALLOW,
        ?LoggerInterface $logger = null,
        private readonly ?\Closure $clock = null,
    ) {
        ScriptCall::validatePrefix($prefix);
        if (!($deadline > 0.0)) {
            throw new Invalid('expected a deadline above 0');
        }
        $this->connection = $redis instanceof ClientInterface ? new Predis($redis) : new PhpRedis($redis);
        $this->failures = new FailurePolicy($onError, $logger);
    }

    public function checkAll(array $demands, bool $refundable = false, float $maxWait = 0.0): Decision
    {
        self::validate($demands, $maxWait);
        $call = ScriptCall::check($this->prefix, $demands, $this->now());
        return $maxWait > 0.0 ? $this->waitFor($call, $maxWait) : $this->decide($call);
    }

    /**
     * {@inheritDoc}
     *
     * Also does nothing when it is called again after an error: the first call may have been executed.
     */
    public function refund(Decision $decision): void
    {
        $call = ScriptCall::refund($decision, $this->now());
        if ($call !== null) {
            $this->run($call);
        }
    }

    /**
     * Deletes the counters of a key for these limits.
     *
     * @param string|list<string> $limits
     * @throws TidegateException if a limit is not accepted, or Redis failed
     */
    public function reset(string $key, string|array $limits): void
    {
        $demands = self::demands($key, $limits, 0);
        self::validate($demands, 0.0);
        $counters = ScriptCall::check($this->prefix, $demands)->counters;
        try {
            $this->connection->send(['DEL', ...$counters], $this->deadline);
        } catch (ErrorReply $reply) {
            throw ScriptCall::error($reply->getMessage());
        }
    }

    private function now(): ?int
    {
        return $this->clock === null ? null : ($this->clock)();
    }

    private function decide(ScriptCall $call): Decision
    {
        try {
            return $call->decode($this->run($call));
        } catch (TidegateException $failure) {
            return $this->failures->apply($failure);
        }
    }

    /** Checks, sleeps for the exact wait, and checks again, until admitted or until the wait would be too long. */
    private function waitFor(ScriptCall $call, float $maxWait): Decision
    {
        $end = hrtime(true) + (int) (1e9 * $maxWait);
        while (true) {
            $decision = $this->decide($call);
            $waitUs = $decision->retryAfterUs;
            if ($waitUs === 0 || $decision->error !== null) {
                return $decision;
            }
            if ($waitUs === LimitStatus::NEVER || 1000 * $waitUs > $end - hrtime(true)) {
                if (!$decision->allowed) {
                    return $decision;
                }
                try {
                    $this->refund($decision); // the place in the leaky bucket is too far back
                } catch (TidegateException $failure) {
                    return $this->failures->apply($failure);
                }
                return $decision->asDenial();
            }
            usleep(max($waitUs, self::PAUSE_MIN_US));
            if ($decision->allowed) {
                return $decision->withoutWait();
            }
        }
    }

    /** Calls the script by its SHA-1, and once with its source if the server does not have it. */
    private function run(ScriptCall $call): mixed
    {
        $end = hrtime(true) + (int) (1e9 * $this->deadline);
        $keysAndArguments = [(string) count($call->keys), ...$call->keys, ...$call->arguments];
        try {
            try {
                return $this->connection->send(['EVALSHA', ScriptCall::sha1(), ...$keysAndArguments], $this->deadline);
            } catch (ErrorReply $reply) {
                if (!str_starts_with($reply->getMessage(), 'NOSCRIPT')) {
                    throw $reply;
                }
                $left = ($end - hrtime(true)) / 1e9;
                if ($left <= 0) {
                    throw new Unavailable(sprintf('Redis did not answer within %g ms', 1000 * $this->deadline));
                }
                return $this->connection->send(['EVAL', ScriptCall::script(), ...$keysAndArguments], $left);
            }
        } catch (ErrorReply $reply) {
            throw ScriptCall::error($reply->getMessage());
        }
    }
}
