<?php

declare(strict_types=1);

namespace Tidegate\Exception;

/** The base class of all exceptions of this package. Messages contain no keys. */
abstract class TidegateException extends \RuntimeException
{
    /** Returns the start of a string in quotes, for messages. */
    public static function shown(string $text): string
    {
        $start = substr($text, 0, 32);
        return (string) json_encode($start, JSON_INVALID_UTF8_SUBSTITUTE | JSON_UNESCAPED_UNICODE | JSON_UNESCAPED_SLASHES);
    }
}
