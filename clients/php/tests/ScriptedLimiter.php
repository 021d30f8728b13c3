<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use Tidegate\Decision;
use Tidegate\Demand;
use Tidegate\Limiter;
use Tidegate\ScriptCall;

/** Answers each check with the next reply of the script. */
final class ScriptedLimiter extends Limiter
{
    /** @var list<Demand> */
    public array $demands = [];
    public bool $isRefundable = false;
    public int $refunds = 0;

    /** @param list<list<int>> $replies */
    public function __construct(private array $replies)
    {
    }

    public function checkAll(array $demands, bool $refundable = false, float $maxWait = 0.0): Decision
    {
        [$this->demands, $this->isRefundable] = [$demands, $refundable];
        return ScriptCall::check('tidegate', $demands)->decode(array_shift($this->replies));
    }

    public function refund(Decision $decision): void
    {
        $this->refunds += (int) (ScriptCall::refund($decision) !== null);
    }
}
