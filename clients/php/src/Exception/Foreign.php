<?php

declare(strict_types=1);

namespace Tollgate\Exception;

/** A key holds data that Tollgate did not write. */
final class Foreign extends TollgateException
{
}
