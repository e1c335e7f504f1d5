package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

// servers is what this process started.
type servers struct {
	env      []string // for the command
	postgres *pgserver.Server
	bouncer  *pgserver.Bouncer
}

// start starts what is missing. On an error the rest runs and is in env.
func (s *servers) start(ctx context.Context) error {
	dsn := os.Getenv(pgserver.PostgresEnv)
	if dsn == "" {
		if err := ensure(ctx, pgserver.FindBinaries, "postgresql-15", "postgresql"); err != nil {
			return err
		}
		srv, err := pgserver.Start(pgserver.Options{})
		if err != nil {
			return err
		}
		dsn = srv.DSN("postgres")
		s.postgres, s.env = srv, append(s.env, pgserver.PostgresEnv+"="+dsn)
	}
	if os.Getenv(pgserver.BouncerEnv) != "" {
		return nil
	}
	if err := ensure(ctx, pgserver.FindBouncer, "pgbouncer"); err != nil {
		return err
	}
	b, err := pgserver.StartBouncer(dsn, pgserver.BouncerOptions{})
	if err != nil {
		return err
	}
	s.bouncer, s.env = b, append(s.env, pgserver.BouncerEnv+"="+b.DSN("postgres"))
	return nil
}

func (s *servers) stop() error {
	var errs []error
	if s.bouncer != nil {
		errs = append(errs, s.bouncer.Stop())
	}
	if s.postgres != nil {
		errs = append(errs, s.postgres.Stop(pgserver.Fast))
	}
	return errors.Join(errs...)
}

// ensure looks for a program and, as root on a system with apt-get, installs the
// first of the packages that is to be had. The error is still ErrNoBinaries if
// that is of no use.
func ensure(ctx context.Context, find func() (string, error), packages ...string) error {
	_, missing := find()
	if !errors.Is(missing, pgserver.ErrNoBinaries) {
		return missing
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("%w; install the package %s", missing, packages[0])
	}
	if err := aptGet(ctx, apt, "update"); err != nil {
		return errors.Join(missing, err)
	}
	var errs []error
	for _, name := range packages {
		err := aptGet(ctx, apt, "install", "--yes", "--no-install-recommends", name)
		if err == nil {
			_, err = find()
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(missing, errors.Join(errs...))
}

// aptGet keeps standard output for the command.
func aptGet(ctx context.Context, path string, args ...string) error {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("apt-get %s: %w", args[0], err)
	}
	return nil
}
