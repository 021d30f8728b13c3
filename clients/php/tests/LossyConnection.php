<?php

declare(strict_types=1);

namespace Tidegate\Tests;

use Predis\Command\CommandInterface;
use Predis\Connection\ConnectionException;
use Predis\Connection\StreamConnection;

/** A connection of Predis that loses the next reply if it is armed. */
final class LossyConnection extends StreamConnection
{
    public static bool $isArmed = false;

    public function executeCommand(CommandInterface $command)
    {
        $reply = parent::executeCommand($command);
        if (self::$isArmed) {
            self::$isArmed = false;
            throw new ConnectionException($this, 'lost by the test');
        }
        return $reply;
    }
}
