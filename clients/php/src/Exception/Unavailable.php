<?php

declare(strict_types=1);

namespace Tollgate\Exception;

/** The service or Redis cannot be reached, does not answer within the deadline, or cannot decide. */
final class Unavailable extends TollgateException
{
}
