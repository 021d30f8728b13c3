<?php

declare(strict_types=1);

namespace Tidegate\Redis;

use Tidegate\Exception\TidegateException;

/**
 * Sends commands through the application's Redis client.
 *
 * @internal
 */
interface Connection
{
    /**
     * Sends a command without the client's key prefix and serializer, and returns the reply within $seconds.
     *
     * @param list<string> $command EVALSHA, EVAL or DEL with its arguments
     * @throws ErrorReply if the server replied with an error
     * @throws TidegateException if there is no reply; the connection is then closed, and opened again by the next command
     */
    public function send(array $command, float $seconds): mixed;
}
