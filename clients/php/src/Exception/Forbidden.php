<?php

declare(strict_types=1);

namespace Tidegate\Exception;

/** The credentials are wrong, or lack a permission. */
final class Forbidden extends TidegateException
{
}
