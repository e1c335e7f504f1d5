package main

import (
	"context"
	_ "embed" // for the page
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/labstack/echo/v5"
	"github.com/labstack/echo/v5/middleware"
	"go.uber.org/zap"
	"gorm.io/gorm"
)

//go:embed page.html
var page []byte

// contentPolicy lets the page do no more than it needs.
const contentPolicy = "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'"

// maxBody bounds the body of a request, in bytes.
const maxBody = 16 << 10

// keepAlive is the time between two signs of life on a stream of events, for
// proxies that end connections on which nothing happens.
const keepAlive = 15 * time.Second

// api answers requests. Its handlers know nothing of transactions: they answer
// when an operation of Orders has returned, and so never before the commit.
type api struct {
	orders  Orders
	journal *Journal
	ready   func(context.Context) error
	closing context.Context // its end ends the streams of events
	log     *zap.Logger
}

func (a *api) handler() *echo.Echo {
	e := echo.NewWithConfig(echo.Config{
		HTTPErrorHandler: a.fail,
		Logger:           slog.New(slog.NewTextHandler(os.Stderr, nil)), // or it writes to standard output
	})
	e.Use(middleware.Recover(), middleware.BodyLimit(maxBody))
	e.GET("/", a.page)
	e.POST("/orders", a.place)
	e.GET("/orders/:id", a.find)
	e.DELETE("/orders/:id", a.cancel)
	e.GET("/events", a.events)
	e.GET("/healthz", a.health)
	return e
}

func (a *api) page(c *echo.Context) error {
	c.Response().Header().Set(echo.HeaderContentSecurityPolicy, contentPolicy)
	return c.HTMLBlob(http.StatusOK, page)
}

func (a *api) place(c *echo.Context) error {
	order, err := parseOrder(c.Request().Body)
	if err != nil {
		return err
	}
	if err := a.orders.Place(c.Request().Context(), &order); err != nil {
		return err
	}
	c.Response().Header().Set(echo.HeaderLocation, fmt.Sprintf("/orders/%d", order.ID))
	return c.JSON(http.StatusCreated, order)
}

func (a *api) find(c *echo.Context) error {
	id, err := parseID(c.Param("id"))
	if err != nil {
		return err
	}
	order, err := a.orders.Find(c.Request().Context(), id)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusOK, order)
}

func (a *api) cancel(c *echo.Context) error {
	id, err := parseID(c.Param("id"))
	if err != nil {
		return err
	}
	if err := a.orders.Cancel(c.Request().Context(), id); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}

// events streams the journal: first what it remembers, then every change.
func (a *api) events(c *echo.Context) error {
	w, ctx := c.Response(), c.Request().Context()
	w.Header().Set(echo.HeaderContentType, "text/event-stream")
	w.Header().Set(echo.HeaderCacheControl, "no-store")
	w.Header().Set("X-Accel-Buffering", "no") // or nginx keeps it back
	w.WriteHeader(http.StatusOK)
	alive := time.NewTicker(keepAlive)
	defer alive.Stop()
	for seen := 0; ; {
		entries, last, changed := a.journal.Since(seen)
		for _, e := range entries {
			if err := writeEvent(w, e); err != nil {
				return err
			}
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			return err
		}
		seen = last
		select {
		case <-changed:
		case <-alive.C:
			if _, err := io.WriteString(w, ": alive\n\n"); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		case <-a.closing.Done():
			return nil
		}
	}
}

func writeEvent(w io.Writer, e Entry) error {
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "data: %s\n\n", data)
	return err
}

func (a *api) health(c *echo.Context) error {
	if err := a.ready(c.Request().Context()); err != nil {
		return echo.NewHTTPError(http.StatusServiceUnavailable, "the database is not ready").Wrap(err)
	}
	return c.JSON(http.StatusOK, map[string]string{"status": "ok"})
}

// fail answers with what an error of a handler means to the client, and logs
// what is not the client's doing. It is the place where all of them arrive,
// panics too.
func (a *api) fail(c *echo.Context, err error) {
	status, reason := meaning(c, err)
	if status >= http.StatusInternalServerError && c.Request().Context().Err() == nil {
		a.log.Error("request failed", zap.String("path", c.Request().URL.Path), zap.Error(err))
	}
	if answer, _ := echo.UnwrapResponse(c.Response()); answer != nil && answer.Committed {
		return // what was sent cannot be taken back
	}
	if err := c.JSON(status, map[string]string{"error": reason}); err != nil {
		a.log.Debug("answer was not sent", zap.Error(err))
	}
}

// meaning is what an error is in the language of HTTP.
func meaning(c *echo.Context, err error) (status int, reason string) {
	var known *echo.HTTPError
	switch {
	case errors.As(err, new(inputError)):
		return http.StatusBadRequest, err.Error()
	case errors.Is(err, gorm.ErrRecordNotFound):
		return http.StatusNotFound, "there is no such order"
	case errors.As(err, &known):
		return known.Code, known.Message
	}
	switch status := echo.StatusCode(err); status {
	case http.StatusNotFound:
		return status, "there is no " + c.Request().URL.Path
	case http.StatusMethodNotAllowed:
		return status, "not with " + c.Request().Method
	case http.StatusRequestEntityTooLarge:
		return status, fmt.Sprintf("the body is larger than %d bytes", maxBody)
	}
	return http.StatusInternalServerError, "the server could not do this; its log says why"
}
