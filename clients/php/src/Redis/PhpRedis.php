<?php

declare(strict_types=1);

namespace Tidegate\Redis;

use Tidegate\Exception\Protocol;
use Tidegate\Exception\Unavailable;

/**
 * phpredis. A read timeout leaves its connection open, and the late reply would be taken for the reply to the next
 * command, so the connection is closed after every failure. phpredis does not open it again by itself.
 *
 * The timeouts of a RedisCluster are those of its constructor. Setting the read timeout later does not change them.
 *
 * @internal
 */
final class PhpRedis implements Connection
{
    /** @var ?array{string, int, int, mixed} host, port, database and credentials of the last connection */
    private ?array $parameters = null;

    public function __construct(private readonly \Redis|\RedisCluster $redis)
    {
    }

    public function send(array $command, float $seconds): mixed
    {
        $timeout = null;
        try {
            $timeout = (float) $this->redis->getOption(\Redis::OPT_READ_TIMEOUT);
            $this->connect($seconds);
            $this->redis->setOption(\Redis::OPT_READ_TIMEOUT, $seconds);
            $this->redis->clearLastError();
            try {
                $reply = $this->redis instanceof \Redis ? $this->redis->rawCommand(...$command) : self::sendToCluster($this->redis, $command);
                $error = $this->redis->getLastError();
            } catch (\RedisException | \RedisClusterException $exception) {
                // phpredis returns some error replies and throws others. A reply begins with a code.
                if (preg_match('/^-?([A-Z][A-Z_]{2,} .*)$|\((CLUSTERDOWN)\)$/Ds', $exception->getMessage(), $match) !== 1) {
                    throw $exception;
                }
                [$reply, $error] = [false, $match[2] ?? $match[1]];
            }
        } catch (\RedisException | \RedisClusterException $exception) {
            $this->close();
            // The message is from phpredis and contains no key.
            $problem = $this->redis instanceof \Redis ? sprintf('Redis did not answer within %g ms', 1000 * $seconds) : 'the Redis Cluster did not answer';
            throw new Unavailable("$problem: {$exception->getMessage()}", 0, $exception);
        } finally {
            if ($timeout !== null) {
                // When connecting, 0 means PHP's own timeout. When set afterwards, 0 means no time at all.
                $this->redis->setOption(\Redis::OPT_READ_TIMEOUT, $timeout != 0.0 ? $timeout : (float) ini_get('default_socket_timeout'));
            }
        }
        if ($reply === $this->redis) {
            throw new Protocol('the Redis connection is in a pipeline or transaction; use a separate connection for the limiter');
        }
        if ($error !== null) {
            $this->redis->clearLastError();
            throw new ErrorReply($error);
        }
        return $reply;
    }

    /**
     * Sends a command to the node that has its keys. The rawCommand of a RedisCluster does not follow redirections. Its
     * other methods do, but they add the client's prefix to keys.
     *
     * @param list<string> $command
     * @throws ErrorReply if the keys have different hash tags; phpredis would print a warning about them
     */
    private static function sendToCluster(\RedisCluster $cluster, array $command): mixed
    {
        $keys = $command[0] === 'DEL' ? array_slice($command, 1) : array_slice($command, 3, (int) $command[2]);
        if (count(array_unique(preg_replace('/^.*?\{(.*?)\}.*$/Ds', '$1', $keys))) > 1) {
            throw new ErrorReply('CROSSSLOT');
        }
        $prefix = $cluster->getOption(\RedisCluster::OPT_PREFIX);
        $cluster->setOption(\RedisCluster::OPT_PREFIX, '');
        try {
            return match ($command[0]) {
                'EVALSHA' => $cluster->evalSha($command[1], array_slice($command, 3), (int) $command[2]),
                'EVAL' => $cluster->eval($command[1], array_slice($command, 3), (int) $command[2]),
                'DEL' => $cluster->del($keys),
            };
        } finally {
            $cluster->setOption(\RedisCluster::OPT_PREFIX, (string) $prefix);
        }
    }

    /** Connects again, with the parameters of the last connection, if there is none. */
    private function connect(float $seconds): void
    {
        if (!$this->redis instanceof \Redis) {
            return; // a RedisCluster connects by itself
        }
        if ($this->redis->isConnected()) {
            $this->parameters = [$this->redis->getHost(), $this->redis->getPort(), $this->redis->getDbNum(), $this->redis->getAuth()];
            return;
        }
        if ($this->parameters === null) {
            throw new \RedisException('the connection was closed before the first check');
        }
        [$host, $port, $database, $auth] = $this->parameters;
        $this->redis->connect($host, $port, $seconds, null, 0, $seconds);
        if ($auth !== null && $auth !== false) {
            $this->redis->auth($auth);
        }
        if ($database > 0) {
            $this->redis->select($database);
        }
    }

    private function close(): void
    {
        try {
            $this->redis->close();
        } catch (\RedisException | \RedisClusterException) {
            // It is closed already.
        }
    }
}
