<?php

declare(strict_types=1);

namespace Tidegate;

use Tidegate\Exception\Invalid;

/** A limit, the key that is counted, and the cost in units. A cost of 0 charges nothing and is always admitted. */
final class Demand
{
    public const MAX = 32;
    private const KEY_BYTES_MAX = 65_536;
    private const COST_MAX = 4_294_967_295;

    /** @throws Invalid if the key is longer than 64 KiB or the cost is not 0 to 4294967295 */
    public function __construct(
        public readonly string $key,
        public readonly string $limit,
        public readonly int $cost = 1,
    ) {
        if (strlen($key) > self::KEY_BYTES_MAX) {
            throw new Invalid(sprintf('a key can have at most %d bytes; this one has %d', self::KEY_BYTES_MAX, strlen($key)));
        }
        if ($cost < 0 || $cost > self::COST_MAX) {
            throw new Invalid(sprintf('a cost must be from 0 to %d, found %d', self::COST_MAX, $cost));
        }
    }
}
