<?php

declare(strict_types=1);

namespace Tidegate\Exception;

/** The service or Redis cannot be reached, does not answer within the deadline, or cannot decide. */
final class Unavailable extends TidegateException
{
}
