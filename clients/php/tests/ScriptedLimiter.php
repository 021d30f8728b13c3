<?php

declare(strict_types=1);

namespace Tollgate\Tests;

use Tollgate\Decision;
use Tollgate\Demand;
use Tollgate\Limiter;
use Tollgate\ScriptCall;

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
        return ScriptCall::check('tollgate', $demands)->decode(array_shift($this->replies));
    }

    public function refund(Decision $decision): void
    {
        $this->refunds += (int) (ScriptCall::refund($decision) !== null);
    }
}
