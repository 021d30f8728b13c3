<?php

declare(strict_types=1);

namespace Tidegate\Exception;

/** An answer is not in a form that Tidegate sends. */
final class Protocol extends TidegateException
{
}
