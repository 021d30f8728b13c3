<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use Psr\Log\AbstractLogger;

/** Keeps the messages that are logged. */
final class MemoryLogger extends AbstractLogger
{
    /** @var list<string> */
    public array $messages = [];

    // Without types, so that it fits all versions of PSR-3.
    public function log($level, $message, array $context = []): void
    {
        $this->messages[] = "$level: $message";
    }
}
