<?php

declare(strict_types=1);

namespace Tidegate\Exception;

/** An argument is not accepted: a limit, key, cost, URL or receipt. Always thrown, whatever onError is. */
final class Invalid extends TidegateException
{
}
