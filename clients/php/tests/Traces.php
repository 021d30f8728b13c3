<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use PHPUnit\Framework\Assert;
use Predis\ClientInterface;
use Tidegate\Demand;
use Tidegate\Exception\Invalid;
use Tidegate\LimitStatus;
use Tidegate\RedisLimiter;

/** Replays the traces of the shared vectors on a limiter. */
final class Traces
{
    /**
     * Replays all traces and compares every decision.
     *
     * The number of the trace is appended to its keys, so that the counters of a cluster are in many slots. A cluster
     * rejects checks of several keys, and a trace ends there.
     */
    public static function replay(\Redis|\RedisCluster|ClientInterface $redis, string $prefix = 'traces', bool $isCluster = false): void
    {
        $now = 0;
        $clock = static function () use (&$now): int {
            return $now;
        };
        $limiter = new RedisLimiter($redis, $prefix, deadline: 30.0, onError: 'raise', logger: new MemoryLogger(), clock: $clock);
        foreach (Servers::vectors()['traces'] as $number => $trace) {
            $key = static fn (string $hex) => hex2bin($hex) . ":$number";
            $decisions = [];
            foreach ($trace['steps'] as $index => $step) {
                $now = $step['at_us'];
                if (isset($step['refund'])) {
                    $limiter->refund($decisions[$step['refund']]);
                    continue;
                }
                if (isset($step['reset'])) {
                    $limiter->reset($key($step['reset']['key_hex']), $step['reset']['limit']);
                    continue;
                }
                $where = "{$trace['name']}, step $index";
                $demands = array_map(static fn (array $demand) => new Demand($key($demand['key_hex']), $demand['limit'], $demand['cost']), $step['check']);
                if ($isCluster && count(array_unique(array_column($step['check'], 'key_hex'))) > 1) {
                    try {
                        $limiter->checkAll($demands);
                        Assert::fail("$where: several keys are accepted");
                    } catch (Invalid $error) {
                        Assert::assertStringContainsString('use one key per check', $error->getMessage(), $where);
                    }
                    break;
                }
                $decisions[$index] = $limiter->checkAll($demands);
                $found = array_map(static fn (LimitStatus $status) => [
                    'allowed' => $status->allowed, 'remaining' => $status->remaining, 'retry_after_us' => $status->retryAfterUs,
                    'next_after_us' => $status->nextAfterUs, 'reset_after_us' => $status->resetAfterUs,
                ], $decisions[$index]->limits);
                Assert::assertSame($step['allowed'], $decisions[$index]->allowed, $where);
                Assert::assertEquals($step['limits'], $found, $where);
            }
        }
    }
}
