// crdserver is the CustomResourceDefinition engine of Kubernetes (k8s.io/apiextensions-apiserver)
// as a program of its own, to be aggregated behind a kube-apiserver.
//
// Unlike the command in that package it also publishes OpenAPI 2, which kube-apiserver 1.20 collects
// from aggregated servers and which kubectl explain reads; without it custom resources are in no
// OpenAPI document at all.
package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"
	extensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	"k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/component-base/cli"
)

func run(ctx context.Context, o *options.CustomResourceDefinitionsServerOptions) error {
	if err := o.Complete(); err != nil {
		return err
	}
	if err := o.Validate(); err != nil {
		return err
	}
	config, err := o.Config()
	if err != nil {
		return err
	}
	namer := openapinamer.NewDefinitionNamer(extensionsapiserver.Scheme, scheme.Scheme)
	config.GenericConfig.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(openapi.GetOpenAPIDefinitions, namer)
	// kube-apiserver describes the paths of CustomResourceDefinitions itself, and takes no document that has
	// them as well. Those of custom resources come later and are not meant here.
	config.GenericConfig.OpenAPIConfig.IgnorePrefixes = []string{"/apis", "/version"}
	server, err := config.Complete().New(genericapiserver.NewEmptyDelegate())
	if err != nil {
		return err
	}
	return server.GenericAPIServer.PrepareRun().RunWithContext(ctx)
}

func main() {
	o := options.NewCustomResourceDefinitionsServerOptions(os.Stdout, os.Stderr)
	command := &cobra.Command{
		Use: "crdserver",
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return o.ServerRunOptions.ComponentGlobalsRegistry.Set()
		},
		RunE: func(c *cobra.Command, _ []string) error { return run(c.Context(), o) },
	}
	command.SetContext(genericapiserver.SetupSignalContext())
	o.AddFlags(command.Flags())
	os.Exit(cli.Run(command))
}
