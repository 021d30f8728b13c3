<?php

declare(strict_types=1);

namespace Tidegate;

use Tidegate\Exception\Invalid;
use Tidegate\Exception\TidegateException;

/** Decides checks and refunds them: {@see Client} asks the service, {@see RedisLimiter} asks Redis. */
abstract class Limiter
{
    /** The longest wait for units, in seconds. */
    private const WAIT_MAX = 60.0;

    /**
     * Takes units of one or several limits for a key, if all of them admit it; otherwise none is charged.
     *
     * @param string|list<string> $limits such as `10/min` or `['10/min', '1000/day']`
     * @param bool $refundable makes the service return a receipt; decisions of the script are always refundable
     * @throws Invalid if an argument is not accepted
     * @throws TidegateException if there is no verdict and onError is `raise`
     */
    public function check(string $key, string|array $limits, int $cost = 1, bool $refundable = false): Decision
    {
        return $this->checkAll(self::demands($key, $limits, $cost), $refundable);
    }

    /**
     * Returns the state of the limits for a key without charging anything.
     *
     * @param string|list<string> $limits
     * @throws TidegateException as for {@see check()}
     */
    public function peek(string $key, string|array $limits): Decision
    {
        return $this->checkAll(self::demands($key, $limits, 0));
    }

    /**
     * Takes units and waits for them up to $seconds, at most 60. If the required wait is longer, the decision is a
     * denial, made at once.
     *
     * @param string|list<string> $limits
     * @throws TidegateException as for {@see check()}
     */
    public function wait(string $key, string|array $limits, float $seconds, int $cost = 1): Decision
    {
        return $this->checkAll(self::demands($key, $limits, $cost), maxWait: $seconds);
    }

    /**
     * Decides several demands together: all are charged, or none.
     *
     * @param list<Demand> $demands 1 to 32, of which no two use the same counter
     * @param float $maxWait the longest time in seconds, up to 60, to wait for units instead of being denied
     * @throws TidegateException as for {@see check()}
     */
    abstract public function checkAll(array $demands, bool $refundable = false, float $maxWait = 0.0): Decision;

    /**
     * Gives back the units that an admission charged, at most once per decision. Does nothing if it charged nothing.
     *
     * @throws TidegateException if the refund failed, whatever onError is
     */
    abstract public function refund(Decision $decision): void;

    /**
     * @param string|list<string> $limits
     * @return list<Demand>
     */
    protected static function demands(string $key, string|array $limits, int $cost): array
    {
        return array_map(static fn (string $limit) => new Demand($key, $limit, $cost), array_values((array) $limits));
    }

    /** @param list<Demand> $demands */
    protected static function validate(array $demands, float $maxWait): void
    {
        if ($demands === []) {
            throw new Invalid('a check needs at least one limit');
        }
        if (count($demands) > Demand::MAX) {
            throw new Invalid(sprintf('a check can have at most %d limits; this one has %d', Demand::MAX, count($demands)));
        }
        if (!($maxWait >= 0.0 && $maxWait <= self::WAIT_MAX)) {
            throw new Invalid(sprintf('a wait must be from 0 to %g seconds', self::WAIT_MAX));
        }
    }
}
