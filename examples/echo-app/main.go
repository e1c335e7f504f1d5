// Echo-app is a small order service that tells others about its orders through
// an outbox. It is meant to be copied.
//
//	go run .                          # http://127.0.0.1:8080, an SQLite file
//	go run . -once                    # place one order, print its message
//	OUTBOX_DSN=postgres://… go run .  # the same on PostgreSQL
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
)

// stopTimeout is how long requests, and after them deliveries, may take to end.
const stopTimeout = 10 * time.Second

func main() {
	o := options{dsn: os.Getenv("OUTBOX_DSN")}
	flag.StringVar(&o.addr, "addr", "127.0.0.1:8080", "`address` to listen on")
	flag.StringVar(&o.file, "db", "", "SQLite `file`, where OUTBOX_DSN names no PostgreSQL database (default "+defaultFile()+")")
	flag.BoolVar(&o.once, "once", false, "on a free port, place one order, print the message that is delivered, and exit")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "echo-app: unexpected argument %q\n", flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, o, os.Stdout, newLogger(os.Stderr)); err != nil {
		fmt.Fprintln(os.Stderr, "echo-app:", err)
		os.Exit(1)
	}
}

type options struct {
	addr string
	dsn  string // of PostgreSQL; empty: SQLite
	file string // of SQLite; empty: a default
	once bool
}

// run serves until ctx ends or, with once, until a message was delivered.
func run(ctx context.Context, o options, stdout io.Writer, log *zap.Logger) (err error) {
	if o.once {
		dir, tempErr := os.MkdirTemp("", "echo-app-")
		if tempErr != nil {
			return fmt.Errorf("make a directory for the database: %w", tempErr)
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		o.addr = "127.0.0.1:0"
		o.file = cmp.Or(o.file, filepath.Join(dir, "orders.db"))
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.addr)
	if err != nil {
		return fmt.Errorf("%w (choose another address with -addr)", err)
	}
	defer listener.Close()
	db, err := openDatabase(o.dsn, cmp.Or(o.file, defaultFile()), log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeDatabase(db)) }()
	journal := NewJournal()
	ob, err := newOutbox(db, outbox.Each(journal.Deliver), log)
	if err != nil {
		return err
	}
	// Deliveries outlast the last request: Stop ends them, not the signal.
	if err := ob.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop(ctx, ob.Stop)) }()
	a := &api{orders: Orders{db, journal}, journal: journal, ready: ob.Check, log: log}
	if o.once {
		return serveOnce(ctx, listener, a, stdout)
	}
	return serve(ctx, listener, a)
}

// newOutbox makes the outbox of the service on db, with its tables. It does
// not relay yet.
func newOutbox(db *gorm.DB, relay outbox.Relay, log *zap.Logger) (*outbox.Instance, error) {
	ob, err := outbox.New(outbox.Config{
		Outboxes: []outbox.Outbox{{Name: "echo-app", Relay: relay, Partitions: 4}},
		Logger:   log.Named("outbox"),
	})
	if err != nil {
		return nil, err
	}
	if err := db.Use(ob); err != nil {
		return nil, err
	}
	if err := outbox.AutoMigrate(db); err != nil {
		return nil, err
	}
	return ob, nil
}

// serve answers requests until ctx ends, and those under way to their end.
func serve(ctx context.Context, listener net.Listener, a *api) error {
	closing, endStreams := context.WithCancel(context.Background())
	defer endStreams()
	a.closing = closing
	server := &http.Server{
		Handler:           a.handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ErrorLog:          zap.NewStdLog(a.log.Named("http")),
	}
	server.RegisterOnShutdown(endStreams)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	a.log.Info("serving", zap.String("url", "http://"+listener.Addr().String()))
	select {
	case err := <-ended:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	a.log.Info("stopping")
	err := stop(ctx, server.Shutdown)
	if err != nil {
		err = errors.Join(fmt.Errorf("stop the server: %w", err), server.Close())
	}
	if served := <-ended; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

// stop runs a function that ends something, within stopTimeout.
func stop(ctx context.Context, end func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	return end(ctx)
}

func newLogger(w io.Writer) *zap.Logger {
	encoder := zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig())
	return zap.New(zapcore.NewCore(encoder, zapcore.Lock(zapcore.AddSync(w)), zap.InfoLevel))
}
