<?php

declare(strict_types=1);

namespace Tollgate\Redis;

use Tollgate\Exception\Protocol;
use Tollgate\Exception\Unavailable;

/**
 * phpredis. A read timeout leaves its connection open, and the late reply would be taken for the reply to the next
 * command, so the connection is closed after every failure. phpredis does not open it again by itself.
 *
 * @internal
 */
final class PhpRedis implements Connection
{
    private bool $isBroken = false;

    public function __construct(private readonly \Redis|\RedisCluster $redis)
    {
    }

    public function send(string $key, array $command, float $seconds): mixed
    {
        $timeout = null;
        try {
            if ($this->redis instanceof \Redis && ($this->isBroken || !$this->redis->isConnected())) {
                $this->reconnect($this->redis, $seconds);
            }
            $this->isBroken = false;
            $timeout = $this->redis->getOption(\Redis::OPT_READ_TIMEOUT);
            $this->redis->setOption(\Redis::OPT_READ_TIMEOUT, $seconds);
            $this->redis->clearLastError();
            $reply = $this->redis instanceof \Redis
                ? $this->redis->rawCommand(...$command)
                : $this->redis->rawCommand($key, ...$command);
            $error = $this->redis->getLastError();
        } catch (\RedisException | \RedisClusterException $exception) {
            $this->isBroken = true;
            $this->close();
            // The message is that of phpredis or of a server that rejects the connection, and contains no key.
            throw new Unavailable(sprintf('Redis did not answer within %g ms: %s', 1000 * $seconds, $exception->getMessage()), 0, $exception);
        } finally {
            if ($timeout !== null && !$this->isBroken) {
                $this->redis->setOption(\Redis::OPT_READ_TIMEOUT, $timeout);
            }
        }
        if ($reply === $this->redis) {
            throw new Protocol('the Redis connection is in a pipeline or transaction; use a connection of its own');
        }
        if ($error !== null) {
            $this->redis->clearLastError();
            throw new ErrorReply($error);
        }
        return $reply;
    }

    private function close(): void
    {
        try {
            $this->redis->close();
        } catch (\RedisException | \RedisClusterException) {
            // It is closed already.
        }
    }

    /** Connects again with the parameters of the last connection. */
    private function reconnect(\Redis $redis, float $seconds): void
    {
        $host = $redis->getHost();
        if (!is_string($host) || $host === '') {
            throw new \RedisException('it was never connected');
        }
        $auth = $redis->getAuth();
        $database = $redis->getDbNum();
        $timeout = $redis->getReadTimeout();
        $redis->connect($host, (int) $redis->getPort(), $seconds, null, 0, $seconds);
        if ($auth !== null && $auth !== false) {
            $redis->auth($auth);
        }
        if (is_int($database) && $database > 0) {
            $redis->select($database);
        }
        $redis->setOption(\Redis::OPT_READ_TIMEOUT, (float) $timeout);
    }
}
