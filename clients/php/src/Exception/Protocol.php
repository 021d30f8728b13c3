<?php

declare(strict_types=1);

namespace Tollgate\Exception;

/** An answer is not in a form that Tollgate sends. */
final class Protocol extends TollgateException
{
}
