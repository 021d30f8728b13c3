<?php

declare(strict_types=1);

namespace Tidegate;

use Psr\Log\LoggerInterface;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\TidegateException;

/**
 * Turns failures into decisions, and logs them at most once a second.
 *
 * @internal
 */
final class FailurePolicy
{
    public const ALLOW = 'allow';
    public const DENY = 'deny';
    public const RAISE = 'raise';

    private const EFFECTS = [
        self::ALLOW => 'requests are admitted',
        self::DENY => 'requests are refused',
        self::RAISE => 'checks fail',
    ];

    /** The time of the last log line, in nanoseconds. */
    private ?int $loggedAt = null;
    private int $suppressed = 0;

    public function __construct(private readonly string $onError, private readonly ?LoggerInterface $logger)
    {
        if (!isset(self::EFFECTS[$onError])) {
            throw new Invalid('onError must be allow, deny or raise, found ' . Invalid::shown($onError));
        }
    }

    /** @throws TidegateException if the failure is an invalid argument, or the policy is `raise` */
    public function apply(TidegateException $failure): Decision
    {
        if ($failure instanceof Invalid) {
            throw $failure;
        }
        $this->log($failure);
        return match ($this->onError) {
            self::ALLOW => new Decision(true, 'none', error: $failure),
            self::DENY => new Decision(false, 'none', Decision::UNAVAILABLE, retryAfterUs: 1_000_000, error: $failure),
            default => throw $failure,
        };
    }

    private function log(TidegateException $failure): void
    {
        if (!$this->mayLog()) {
            $this->suppressed++;
            return;
        }
        $message = 'tidegate: no verdict; ' . self::EFFECTS[$this->onError] . ': ' . $failure->getMessage();
        $suppressed = $this->suppressed;
        $this->suppressed = 0;
        if ($this->logger !== null) {
            $this->logger->warning($message, ['suppressed' => $suppressed]);
        } else {
            error_log("$message (suppressed: $suppressed)");
        }
    }

    /** Returns whether a second has passed since the last log line: by any process with APCu, else by this object. */
    private function mayLog(): bool
    {
        if (function_exists('apcu_enabled') && apcu_enabled()) {
            return apcu_add('tidegate:failure-logged', 1, 1);
        }
        $now = hrtime(true);
        if ($this->loggedAt !== null && $now - $this->loggedAt < 1_000_000_000) {
            return false;
        }
        $this->loggedAt = $now;
        return true;
    }
}
