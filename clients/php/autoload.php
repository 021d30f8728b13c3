<?php

declare(strict_types=1);

// Loads the classes of this package without Composer.
spl_autoload_register(static function (string $class): void {
    foreach (['Tidegate\\Tests\\' => __DIR__ . '/tests/', 'Tidegate\\' => __DIR__ . '/src/'] as $prefix => $directory) {
        if (str_starts_with($class, $prefix)) {
            $file = $directory . str_replace('\\', '/', substr($class, strlen($prefix))) . '.php';
            if (is_file($file)) {
                require $file;
            }
            return;
        }
    }
});
