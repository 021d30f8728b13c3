<?php

declare(strict_types=1);

namespace Tidegate;

use Tidegate\Exception\Foreign;
use Tidegate\Exception\Forbidden;
use Tidegate\Exception\Invalid;
use Tidegate\Exception\Protocol;
use Tidegate\Exception\TidegateException;
use Tidegate\Exception\Unavailable;

/**
 * A call of the Lua script: encodes checks and refunds, and decodes replies, without a Redis client. The header comment
 * of tidegate.lua documents the protocol.
 */
final class ScriptCall
{
    /** The version of the state that the script writes, which is a part of every key. */
    public const STATE_VERSION = 'tg2';

    private const PART_BYTES_MAX = 128;
    private const PREFIX_BYTES_MAX = 64;

    private static ?string $script = null;
    private static ?string $sha1 = null;

    /**
     * @param list<string> $keys
     * @param list<string> $arguments
     * @param list<string> $counters the keys of the counters, without those of bans
     * @param list<Demand> $demands
     * @param list<Limit> $limits
     */
    private function __construct(
        public readonly array $keys,
        public readonly array $arguments,
        public readonly array $counters,
        private readonly array $demands,
        private readonly array $limits,
    ) {
    }

    /** Returns the source of the script, for EVAL. */
    public static function script(): string
    {
        return self::$script ??= (string) file_get_contents(__DIR__ . '/tidegate.lua');
    }

    /** Returns the SHA-1 of the script, for EVALSHA. */
    public static function sha1(): string
    {
        return self::$sha1 ??= sha1(self::script());
    }

    /**
     * Encodes a check on keys with this prefix.
     *
     * @param list<Demand> $demands
     * @param ?int $nowUs the time in microseconds, for tests; null for the clock of the server
     * @throws Invalid if a limit or the prefix is not accepted, or two demands use the same counter
     */
    public static function check(string $prefix, array $demands, ?int $nowUs = null): self
    {
        self::validatePrefix($prefix);
        $bans = $counters = $lines = $limits = [];
        foreach ($demands as $demand) {
            $limit = Limit::parse($demand->limit);
            $start = $prefix . ':' . self::STATE_VERSION . ':{' . self::escape($demand->key) . '}:';
            $counter = "$start$limit->algorithm:$limit->windowUs";
            $first = array_search($counter, $counters, true);
            if ($first !== false) {
                throw new Invalid(sprintf('limits %d and %d (counted from 0) use the same counter; merge them or give them different keys', $first, count($counters)));
            }
            $counters[] = $counter;
            $lines[] = $limit->line($demand->cost);
            $limits[] = $limit;
            $bans[$start . 'ban'] = true;
        }
        $charges = array_sum(array_map(static fn (Demand $demand) => $demand->cost, $demands)) > 0;
        // Keys of arrays become integers if they look like one, which no ban key does.
        $banKeys = $charges ? array_keys($bans) : [];
        $head = sprintf('check %d %d', count($lines), count($banKeys));
        return new self([...$banKeys, ...$counters], [(string) $nowUs, $head, ...$lines], $counters, $demands, $limits);
    }

    /** Encodes a refund; null if there is nothing to give back, or if it was called for this decision before. */
    public static function refund(Decision $decision, ?int $nowUs = null): ?self
    {
        $refund = $decision->refundData();
        if ($refund === null || $refund->keys === [] || $refund->isDone) {
            return null;
        }
        $refund->isDone = true;
        $arguments = [(string) $nowUs, 'refund ' . count($refund->keys), ...$refund->lines];
        return new self($refund->keys, $arguments, $refund->keys, [], []);
    }

    /**
     * Decodes the reply to a check.
     *
     * @throws Protocol if it is not a reply of the script
     */
    public function decode(mixed $reply): Decision
    {
        if (!is_array($reply) || !array_is_list($reply) || array_filter($reply, 'is_int') !== $reply) {
            throw new Protocol('the script returned something other than integers');
        }
        if (count($reply) === 3 && $reply[1] === 0) {
            return new Decision(false, 'store', Decision::BANNED, retryAfterUs: max($reply[2], LimitStatus::NEVER), atUs: $reply[0]);
        }
        if (count($reply) !== 2 + 6 * count($this->limits) || $reply[1] !== 1) {
            throw new Protocol('the script returned a malformed reply');
        }
        $statuses = $keys = $lines = [];
        $allowed = true;
        foreach (self::distinctNames($this->limits) as $index => $name) {
            [$isAllowed, $remaining, $retryAfter, $nextAfter, $resetAfter, $refunded] = array_slice($reply, 2 + 6 * $index, 6);
            if ($isAllowed < 0 || $isAllowed > 1 || min($remaining, $retryAfter, $nextAfter, $resetAfter) < LimitStatus::NEVER || $refunded < 0) {
                throw new Protocol('the script returned a malformed reply');
            }
            $limit = $this->limits[$index];
            $cost = $this->demands[$index]->cost;
            $statuses[] = new LimitStatus($name, null, $isAllowed === 1, $limit->quota, $limit->windowUs, $cost, $remaining, $retryAfter, $nextAfter, $resetAfter, $limit->capacity);
            $allowed = $allowed && $isAllowed === 1;
            if ($cost > 0 && $resetAfter !== LimitStatus::NEVER) {
                $keys[] = $this->counters[$index];
                array_push($lines, $limit->line($cost), "$reply[0] $resetAfter $refunded");
            }
        }
        $refund = $allowed && $keys !== [] ? new Refund(keys: $keys, lines: $lines) : null;
        return new Decision($allowed, 'store', $allowed ? null : Decision::RATE_LIMITED, $statuses, atUs: $reply[0], refund: $refund);
    }

    /**
     * Converts an error reply of Redis to an exception. The first word determines its class; the rest may contain keys
     * and is not part of the message.
     */
    public static function error(string $reply): TidegateException
    {
        [$code, $rest] = explode(' ', $reply, 2) + [1 => ''];
        $crossSlot = 'the keys of one check are in different slots of the Redis Cluster; use one key per check';
        $noPermission = 'the Redis user lacks permission to run the script or to access its keys';
        switch ($code) {
            case 'OOM':
            case 'LOADING':
            case 'READONLY':
            case 'BUSY':
            case 'MASTERDOWN':
            case 'MISCONF':
            case 'NOREPLICAS':
            case 'CLUSTERDOWN':
            case 'TRYAGAIN':
                return new Unavailable("Redis cannot decide at the moment ($code)");
            case 'MOVED':
            case 'ASK':
                return new Unavailable('the server is a node of a Redis Cluster and does not have the key; use a cluster client');
            case 'NOAUTH':
            case 'WRONGPASS':
                return new Forbidden('Redis requires a different user or password');
            case 'NOPERM':
                return new Forbidden($noPermission);
            case 'CROSSSLOT':
                return new Invalid($crossSlot);
            case 'TIDEGATE_FOREIGN':
                return new Foreign("a counter's key holds data that Tidegate did not write; delete it");
            case 'TIDEGATE_PARTLY':
                return self::error($rest);
        }
        return match (true) {
            str_contains($reply, 'max number of clients') => new Unavailable('Redis has reached its connection limit (maxclients)'),
            str_contains($reply, 'ACL failure in script'),
            str_contains($reply, "The user executing the script can't") => new Forbidden($noPermission),
            str_contains($reply, 'non local key'),
            str_contains($reply, 'same slot') => new Invalid($crossSlot),
            default => new Protocol('Redis returned an unknown error (' . (preg_match('/^[A-Z_]{1,32}$/D', $code) === 1 ? $code : 'no code') . ')'),
        };
    }

    /** @throws Invalid unless it is 1 to 64 printable ASCII characters without braces and spaces */
    public static function validatePrefix(string $prefix): void
    {
        if (preg_match('/^[!-z|~]{1,' . self::PREFIX_BYTES_MAX . '}$/D', $prefix) !== 1) {
            throw new Invalid(sprintf('a key prefix must be 1 to %d printable ASCII characters without braces or spaces', self::PREFIX_BYTES_MAX));
        }
    }

    /**
     * Escapes a subject: printable ASCII except %, { and } as it is, other bytes as %XX; more than 128 bytes as %h and
     * the SHA-256 of the subject; an empty subject as %e.
     */
    private static function escape(string $subject): string
    {
        if ($subject === '') {
            return '%e';
        }
        $escaped = (string) preg_replace_callback('/[^!-$&-z|~]/', static fn (array $match) => sprintf('%%%02X', ord($match[0])), $subject);
        return strlen($escaped) > self::PART_BYTES_MAX ? '%h' . hash('sha256', $subject) : $escaped;
    }

    /**
     * Names limits by their windows. A name that an earlier limit has gets the smallest number, from 2, that makes it
     * unique.
     *
     * @param list<Limit> $limits
     * @return list<string>
     */
    private static function distinctNames(array $limits): array
    {
        $names = array_map(static fn (Limit $limit) => str_replace(' ', '-', Limit::period($limit->windowUs)), $limits);
        foreach ($names as $index => $name) {
            if (!in_array($name, array_slice($names, 0, $index), true)) {
                continue;
            }
            for ($number = 2; in_array($names[$index], [...array_slice($names, 0, $index), ...array_slice($names, $index + 1)], true); $number++) {
                $names[$index] = "$name-$number";
            }
        }
        return $names;
    }
}
