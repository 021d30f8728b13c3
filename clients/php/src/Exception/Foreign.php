<?php

declare(strict_types=1);

namespace Tidegate\Exception;

/** A key holds data that Tidegate did not write. */
final class Foreign extends TidegateException
{
}
