<?php

declare(strict_types=1);

namespace Tidegate;

/**
 * What a refund needs. A decision holds it.
 *
 * @internal
 */
final class Refund
{
    public bool $isDone = false;

    /**
     * @param string $receipt of the service; empty for decisions of the script
     * @param list<string> $endings the outcomes for which the rules refund: success, failure
     * @param list<string> $keys of the script
     * @param list<string> $lines a limit line and a receipt for each key
     */
    public function __construct(
        public readonly string $receipt = '',
        public readonly array $endings = [],
        public readonly array $keys = [],
        public readonly array $lines = [],
    ) {
    }
}
