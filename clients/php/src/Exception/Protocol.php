<?php

declare(strict_types=1);

namespace Tollgate\Exception;

/** An answer is not one that Tollgate gives. */
final class Protocol extends TollgateException
{
}
