<?php

declare(strict_types=1);

namespace Tidegate;

/** The part of a decision that belongs to one limit. Times are in microseconds; -1 stands for never. */
final class LimitStatus
{
    public const NEVER = -1;

    public function __construct(
        public readonly string $name,
        public readonly ?string $rule,
        public readonly bool $allowed,
        public readonly int $quota,
        public readonly int $windowUs,
        public readonly int $cost,
        public readonly int $remaining,
        /** The time until this cost would be admitted. */
        public readonly int $retryAfterUs,
        /** The time until one more unit is available. */
        public readonly int $nextAfterUs,
        /** The time until the limit is whole again. */
        public readonly int $resetAfterUs,
        /** The largest cost that can ever pass: the burst, the queue or the quota. */
        public readonly int $capacity,
    ) {
    }

    /**
     * Returns the status that restricts the client most: of the denials the one with the longest wait, else the one with
     * the smallest part of its quota left; on a tie the first.
     *
     * @param list<self> $statuses
     */
    public static function strictest(array $statuses): ?self
    {
        $found = null;
        foreach ($statuses as $next) {
            if ($found === null || $next->isStricterThan($found)) {
                $found = $next;
            }
        }
        return $found;
    }

    /** Returns the wait that headers show: until this cost would pass, or until one more unit is available. */
    public function untilNextUs(): int
    {
        return $this->allowed ? $this->nextAfterUs : $this->retryAfterUs;
    }

    public static function isLonger(int $oneUs, int $otherUs): bool
    {
        return $otherUs !== self::NEVER && ($oneUs === self::NEVER || $oneUs > $otherUs);
    }

    private function isStricterThan(self $other): bool
    {
        if ($this->allowed !== $other->allowed) {
            return $other->allowed;
        }
        return $this->allowed
            ? $this->remaining * $other->quota < $other->remaining * $this->quota
            : self::isLonger($this->retryAfterUs, $other->retryAfterUs);
    }
}
