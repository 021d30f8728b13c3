<?php

declare(strict_types=1);

namespace Tidegate\Redis;

/**
 * An error reply of Redis. Its message is the reply.
 *
 * @internal
 */
final class ErrorReply extends \Exception
{
}
