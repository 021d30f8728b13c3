<?php

declare(strict_types=1);

require __DIR__ . '/../autoload.php';

// Debian's packages have an autoloader each. With Composer, one file loads everything.
$composer = __DIR__ . '/../vendor/autoload.php';
foreach (is_file($composer) ? [$composer] : ['Nyholm/Psr7/autoload.php', 'Predis/autoload.php', 'Psr/Log/autoload.php'] as $file) {
    require $file;
}

// Debian has no package of psr/http-server-middleware.
if (!interface_exists(Psr\Http\Server\MiddlewareInterface::class)) {
    require __DIR__ . '/psr15.php';
}
